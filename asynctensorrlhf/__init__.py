"""AsyncTensorRLHF: asynchronous reinforcement learning for language models, with rewards on the device.

Knows the version; imports nothing, so that `import asynctensorrlhf` is instant.
"""

__version__ = "0.1.0"
