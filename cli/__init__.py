"""The command line: ``kvferry``."""
