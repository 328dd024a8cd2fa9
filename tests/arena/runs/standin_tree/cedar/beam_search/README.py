# My answer

```python
def batched_beam_search(): ...
```
