"""Where weights of other libraries come from: folders of safetensors, GGUF files, PyTorch's pickles."""
