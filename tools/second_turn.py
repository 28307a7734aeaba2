#!/usr/bin/env python3
"""How soon a long conversation goes on: the time to the first token of its later turns at a running server, and where
it goes. New tokens have a time of their own, as a part of all that ran; what is more is what the cached ones cost: the
tokens between the last border and their end, finding pages, copying a state, reading the whole text. Needs no packages.

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


def in_steps(url):
    """Seconds that a server of kt's spent in steps so far."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("kt_step_part_seconds_total"))


def cached_of(usage):
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    for name, number, words in (("tokens", 32768, "of the first turn"), ("new", 64, "of a later message"),
                                ("turns", 4, "in all"), ("seed", 1, "")):
        parser.add_argument("--" + name, type=int, default=number, help=f"{words} [{number}]")
    args = parser.parse_args()
    draw = random.Random(args.seed)

    def said(words):
        return [dict(role="user", content=story(draw, words))]

    small, large = (chat(args.url, said(words), 1)[2]["prompt_tokens"] for words in (100, 600))
    each = (large - small) / 500  # tokens of a word
    messages, before = said(round(args.tokens / each)), 0
    for turn in range(args.turns):
        steps = in_steps(args.url)
        first, answer, usage = chat(args.url, messages, 1)
        steps = in_steps(args.url) - steps
        tokens, cached = usage["prompt_tokens"], cached_of(usage)
        own = steps * (tokens - before) / (tokens - cached)
        print(f"turn {turn + 1}: {tokens} tokens, {cached} cached, {tokens - before} new: first token after "
              f"{first * 1e3:.0f} ms, of which {steps * 1e3:.0f} in steps, {own * 1e3:.0f} for the new tokens; "
              f"{(first - own) * 1e3:.0f} more", flush=True)
        messages += [dict(role="assistant", content=answer), *said(round(args.new / each))]
        before = tokens


if __name__ == "__main__":
    main()
