"""The eight at work in one language model: Llama, Mistral, Qwen3 and GPT-2 shapes."""
