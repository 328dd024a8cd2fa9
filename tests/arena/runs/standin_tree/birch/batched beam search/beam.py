"""Beam search over a function that gives log-probabilities."""


def batched_beam_search(model, prompts, beam_width, max_new_tokens, alpha, eos_token_id):
    answers = []
    for prompt in prompts:
        beams = [([], 0.0, False)]
        for _ in range(max_new_tokens):
            pool = [beam for beam in beams if beam[2]]
            if len(pool) == len(beams):
                break
            for tokens, total, done in beams:
                if done:
                    continue
                row = model(prompt + tokens)
                for token in sorted(range(len(row)), key=lambda t: -row[t])[: 2 * beam_width]:
                    ends = token == eos_token_id
                    pool.append((tokens + [token], total + (0.0 if ends else float(row[token])), ends))
            pool.sort(key=lambda beam: -beam[1] / len(beam[0]) ** alpha)
            beams = pool[:beam_width]
        answers.append([(tokens, total / len(tokens) ** alpha) for tokens, total, _ in beams])
    return answers
