"""The torch engine: packed multi-adapter training and sampling on CPU, CUDA and MPS."""
