"""Advanced indexing for the copy; one sequence at a time, in float32, for attention."""

import torch


def paged_append(k, v, k_pages, v_pages, slots):
    page_size = k_pages.shape[1]
    written = slots >= 0
    page, row = slots // page_size, slots % page_size
    for new, pages in ((k, k_pages), (v, v_pages)):
        for token in range(k.shape[0]):
            if written[token]:
                pages[page[token], row[token]] = new[token]


def paged_attention(q, k_pages, v_pages, block_table, seq_lens, out):
    B, H, D = q.shape
    page_size, G = k_pages.shape[1], k_pages.shape[2]
    for sequence in range(B):
        length = int(seq_lens[sequence])
        if length == 0:
            out[sequence] = 0.0
            continue
        pages = block_table[sequence, : -(-length // page_size)].long()
        keys = k_pages[pages].reshape(-1, G, D)[:length].float()
        values = v_pages[pages].reshape(-1, G, D)[:length].float()
        for group in range(G):
            heads = slice(group * (H // G), (group + 1) * (H // G))
            scores = q[sequence, heads].float() @ keys[:, group].T * D**-0.5
            weights = torch.softmax(scores, dim=1)
            out[sequence, heads] = (weights @ values[:, group]).to(out.dtype)
