"""The evaluation: runs submissions where they cannot reach the judge, and judges them. Knows no
challenge by name."""
