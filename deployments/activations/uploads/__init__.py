"""The safetensors files that clients send: tensors and readouts."""
