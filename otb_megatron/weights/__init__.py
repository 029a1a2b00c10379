"""One description of how Hugging Face and Megatron-Core weights correspond, used by import, export and the weight transfer to vLLM."""
