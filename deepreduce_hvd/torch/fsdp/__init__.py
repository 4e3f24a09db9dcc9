"""The adapter for PyTorch's fully_shard (FSDP2), which compresses between hosts."""
