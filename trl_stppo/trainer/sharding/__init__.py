"""Support of DeepSpeed and FSDP, and checks of its limits."""
