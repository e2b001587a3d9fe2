"""What `kvferry bench kernels` compiles, checks and times: a module of cases per kernel."""
