#!/usr/bin/env python3
"""How soon a long conversation goes on: the time to the first token of its later turns at a running server, beside that
of the same number of new tokens alone. What lies between the two is what the conversation costs that is cached: finding
its pages, copying a state, the tokens between the last border and its end, attention to all before. Needs no packages.

    kt run MODEL.gguf --port 8001 --chat-template T.jinja
    second_turn.py http://127.0.0.1:8001 --tokens 32768 --new 64 --turns 4
"""
import argparse
import json
import random
import time
import urllib.request

WORDS = ("the fox went into a wood and saw an owl who had three old maps of all rivers so they sat down to read what"
         " was written on them until night fell").split()


def story(draw, words):
    return " ".join(draw.choice(WORDS) for _ in range(words))


def chat(url, messages, tokens):
    """(seconds to the first token, the answer, usage)."""
    body = json.dumps(dict(messages=messages, max_tokens=tokens, temperature=0, stream=True, ignore_eos=True,
                           stream_options=dict(include_usage=True))).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    start, first, answer, usage = time.perf_counter(), None, "", {}
    with urllib.request.urlopen(request, timeout=3600) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                # Bytes that are no whole letter yet come as an empty text: the first event after the role counts.
                delta = choice["delta"]
                if "role" not in delta or delta.get("content"):
                    first = first or time.perf_counter() - start
                answer += delta.get("content") or ""
    return first, answer, usage


def cached_of(usage):
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    for name, number, words in (("tokens", 32768, "of the first turn"), ("new", 64, "of a later message"),
                                ("turns", 4, "in all"), ("answer", 16, "tokens of an answer"), ("seed", 1, "")):
        parser.add_argument("--" + name, type=int, default=number, help=f"{words} [{number}]")
    args = parser.parse_args()
    draw = random.Random(args.seed)

    def said(words):
        return [dict(role="user", content=story(draw, words))]

    small, large = (chat(args.url, said(words), 1)[2]["prompt_tokens"] for words in (100, 600))
    each = (large - small) / 500  # tokens of a word
    new = round(args.new / each)
    alone = sorted(chat(args.url, said(new), 2) for _ in range(5))[2]
    print(f"{alone[2]['prompt_tokens']} tokens alone: first token after {alone[0] * 1e3:.0f} ms")
    messages = said(round(args.tokens / each))
    for turn in range(args.turns):
        first, answer, usage = chat(args.url, messages, args.answer)
        print(f"turn {turn + 1}: {usage['prompt_tokens']} tokens, {cached_of(usage)} of them cached: first token after "
              f"{first * 1e3:.0f} ms" + (f", {(first - alone[0]) * 1e3:.0f} ms more" if turn else ""), flush=True)
        messages += [dict(role="assistant", content=answer), *said(new)]


if __name__ == "__main__":
    main()
