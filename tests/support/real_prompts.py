"""Twenty prompts as people send them: prose, code, many scripts, emoji, chats, long and short."""

from __future__ import annotations

from kvferry.models.tokenizer import Tokenizer

_FERRY = (
    "The old ferry left the harbour at six in the morning, when the fog still lay on the water and "
    "the lamps along the quay burned yellow. On board were a schoolteacher with a trunk of books, "
    "two brothers who sold honey, and a girl who had never seen the sea. The captain, a quiet man "
    "with grey hands, counted his passengers twice and wrote the number in a small notebook. "
)
_MINUTES = (
    "Minutes of the meeting of 3 March. Present: the chair, the treasurer, four members. The "
    "treasurer reported that 1,240 had been collected and 975 spent, mostly on paint and timber. "
    "The roof of the boathouse must be mended before autumn. It was agreed to ask three builders "
    "for a price and to decide in April. A member asked whether the old dinghy could be sold; the "
    "chair thought not, since children learn in it. "
)
_CODE = '''def merge(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
'''

TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "A",
    "1, 1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n",
    _CODE,
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "',
    "Die Hauptstadt von Deutschland ist",
    "El perro corre por el parque y luego",
    "日本の首都は",
    "Столица России —",
    "Party time 🎉🎈 see you at 8 😀",
    "Dear Sir or Madam,\n\nI am writing to",
    _FERRY * 2 + "Nobody spoke until the first bell, and then",
    _MINUTES + _FERRY + _MINUTES.replace("3 March", "7 April") + "Summary: the club",
)
CHATS = (
    ("What is the capital of Italy?",),
    ("Answer with one word only: yes or no. Is water wet?",),
    ("Hi!", "Hello! How can I help you today?", "Write a line of Python that reverses a list."),
    ("Translate to French: good morning, my friend 🙂",),
)


def real_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of all twenty."""
    plain = [tokenizer.encode(text) for text in TEXTS]
    roles = ("user", "assistant")
    chats = [
        tokenizer.encode_chat(
            [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        )
        for turns in CHATS
    ]
    return plain + chats
