"""How the embedded models are made: text, tokenizer and training, and how texts are judged."""
