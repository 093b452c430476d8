"""The safetensors files that clients send: tensors and readouts.

What readouts compute is in `deployments.readouts`; profiles are in `state/`.
"""
