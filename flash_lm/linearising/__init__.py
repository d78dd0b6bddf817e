"""A pretrained softmax Transformer becomes a model with linear attention: stages, and which layers stay softmax."""
