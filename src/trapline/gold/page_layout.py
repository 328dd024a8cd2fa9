"""Orders in which pages of keys and values lie in memory.

B stands for pages, S for the positions of a page, H for key/value heads, D for the head width. Code
handles pages as (B, H, S, D) with any strides; the order of memory decides what is contiguous:

| layout | contiguous for one position | for one head of a page | a head of all pages |
|---|---|---|---|
| bshd | all heads | one row | – |
| bhsd | one head | all its rows | – |
| hbsd | one head | all its rows | one block, as tensor parallelism by heads splits it |
"""

from typing import Any, Literal, get_args

from trapline.gold.errors import RangeError

PageLayout = Literal["bhsd", "bshd", "hbsd"]


def check_layout(layout: str) -> None:
    if layout not in get_args(PageLayout):
        raise RangeError(f"layout must be one of {', '.join(get_args(PageLayout))}, got {layout!r}")


def as_pages(array: Any, layout: PageLayout) -> Any:
    """A view (B, H, S, …) of pages, or of their scales, that are given in this layout."""
    if layout == "bshd":
        return array.swapaxes(1, 2)
    return array.swapaxes(0, 1) if layout == "hbsd" else array


def memory_shape(pages: int, heads: int, positions: int, layout: PageLayout) -> tuple[int, ...]:
    """The first axes of pages in this layout."""
    sizes = {"b": pages, "h": heads, "s": positions}
    return tuple(sizes[letter] for letter in layout if letter in sizes)
