"""Redaction: everything planted goes, almost everything else stays, twice is once."""

import random
import string

import pytest

from trapline.arena.solving.redact import Redactor, is_random

CHANCE = random.Random(20)
ALPHABET = string.ascii_letters + string.digits


def noise(n, alphabet=ALPHABET):
    """Random characters, with each kind among them."""
    text = "".join(CHANCE.choice(alphabet) for _ in range(n - 3))
    return text + "aZ7" if alphabet == ALPHABET else text + "abc"[: n - len(text)]


def word():
    return "".join(CHANCE.choice(string.ascii_lowercase) for _ in range(7))


def planted():
    """At least 200 secrets and identities, each with the line of a transcript it stands in."""
    for _ in range(14):
        user, host = word(), word()
        yield noise(32), "OPENAI_API_KEY=sk-{}"
        yield noise(40), "using key sk-ant-{} from the keyring"
        yield noise(36), "remote: https://ghp_{}@example.invalid/repo.git"
        yield noise(16), "aws_access_key_id = AKIA{}"
        yield noise(30), "Authorization: Bearer {}"
        yield noise(24), '"password": "{}",'
        yield noise(34), "hf_{} is cached"
        yield f"{user}.smith@{host}.com", "Author: Sam <{}>"
        yield user, "cd /home/{}/project && ls"
        yield user, "saved to /Users/{}/Desktop/out.txt"
        yield user, "C:\\Users\\{}\\AppData"
        yield f"{user}@{host}x", "{}:~$ python solution.py"
        yield noise(44), "session cookie {} expires"
        yield noise(20), "postgres://app:{}@db:5432/x"
        yield (
            f"10.{CHANCE.randrange(256)}.{CHANCE.randrange(256)}.{CHANCE.randrange(1, 256)}",
            "GET / from {}",
        )
        yield noise(48, "0123456789abcdef"), "secret_token={}"


PROSE = """
The backward pass of layer norm has three terms; the projection onto x_hat is often forgotten.
def layer_norm_backward(dy, cache):
    x_hat, rstd, gamma = cache
    return rstd * (dy * gamma - (dy * gamma).mean(-1) - x_hat * (dy * gamma * x_hat).mean(-1))
assert np.allclose(out, ref, atol=1e-6), f"max error {np.abs(out - ref).max():.3e}"
tokens used: 18423 input, 2048 output; step 3 of 12; loss 2.718281828 at iteration 1500
sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  solution.py
File "solution.py", line 42, in flash_attention_forward_with_online_softmax
kernel<<<dim3(128, 4), 256>>>(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_qb, stride_qh)
commit 3fc509f1c2d3e4f5a6b7c8d9e0f1a2b3c4d5e6f7 fixes the off-by-one in the causal mask
127.0.0.1 is here; CamelCaseIdentifiersThatAreVeryLong and snake_case_ones_too_long_for_words
next_token = int(logits.argmax()); max_new_tokens: int = 128; tokens = tokenizer(prompt)
""".strip()


@pytest.fixture
def redactor():
    return Redactor(
        environment={
            "MY_SERVICE_TOKEN": "correct-horse-battery",
            "HOME": "/srv/people/kim",
            "PATH": "/bin",
        },
        names=("kimberley", "build-host-7"),
    )


def test_everything_planted_is_removed(redactor):
    secrets, lines = [], []
    for secret, template in planted():
        secrets.append(secret)
        lines.append(template.format(secret))
        lines.append(CHANCE.choice(PROSE.splitlines()))
    assert len(secrets) >= 200
    safe = redactor.redact("\n".join(lines))
    assert [secret for secret in secrets if secret in safe] == []
    assert redactor.scan(safe) == []


def test_the_scan_sees_what_redaction_removes(redactor):
    for secret, template in planted():
        assert redactor.scan(template.format(secret)), template


def test_prose_and_code_stay(redactor):
    text = PROSE * 5
    changed = sum(a != b for a, b in zip(text, redactor.redact(text), strict=False))
    assert redactor.redact(text) == text, changed


def test_values_of_this_environment_are_removed(redactor):
    text = "kimberley on build-host-7 in /srv/people/kim with correct-horse-battery; /bin stays"
    assert redactor.redact(text) == "<name> on <name> in <home> with <key>; /bin stays"


def test_redacting_twice_changes_nothing(redactor):
    text = "\n".join(template.format(secret) for secret, template in planted())
    once = redactor.redact(text)
    assert redactor.redact(once) == once


def test_private_key_is_removed_whole(redactor):
    text = "x\n-----BEGIN RSA PRIVATE KEY-----\nabc\ndef\n-----END RSA PRIVATE KEY-----\ny"
    assert redactor.redact(text) == "x\n<private-key>\ny"


@pytest.mark.parametrize("text", ["flash_attention_backward_kernel_v2", "A" * 40, "f" * 32])
def test_long_words_are_kept(text):
    assert not is_random(text)
