"""From a prompt to an answer: endpoints, agents and their transcripts."""
