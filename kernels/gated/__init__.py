"""SwiGLU and GeGLU."""
