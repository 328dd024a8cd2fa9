"""The evaluation: runs submissions where they cannot reach the judge, and judges them."""
