"""What ranks tell each other beside gradients: what they agree on, who takes part, who is missing."""
