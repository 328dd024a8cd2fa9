import numpy as np


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    results = []
    for prompt in prompts:
        beams = [([], 0.0)]
        done = []
        for step in range(max_new_tokens):
            cands = []
            for tokens, lp in beams:
                row = np.asarray(lm.log_probs([list(prompt) + tokens]))[0]
                best = np.argsort(row, kind="stable")[::-1][:beam_width]
                for t in best:
                    cands.append((tokens + [int(t)], lp + float(row[t])))
            cands.sort(key=lambda c: c[1], reverse=True)
            beams = []
            for tokens, lp in cands[:beam_width]:
                if tokens[-1] == eos_id:
                    done.append((tokens, lp / len(tokens) ** length_penalty))
                else:
                    beams.append((tokens, lp))
            if len(done) >= beam_width or not beams:
                break
        if not done:
            done = [(tokens, lp / len(tokens) ** length_penalty) for tokens, lp in beams]
        done.sort(key=lambda d: d[1], reverse=True)
        results.append(done[:beam_width])
    return results
