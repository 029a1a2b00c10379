"""Where prompts come from, in which order, and how samples are packed into forward passes."""
