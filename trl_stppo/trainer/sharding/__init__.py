"""DeepSpeed and FSDP: what they change, and what they cannot do here."""
