"""From a prompt to an answer without hands: endpoints, agents, and what they said on the way."""
