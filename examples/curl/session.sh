#!/bin/sh
# A session with a running server, in nothing but curl:
#
#   kt run demo &                        # prints "ready: http://127.0.0.1:30000"
#   examples/curl/session.sh             # or: session.sh http://host:port
set -eu
url=${1:-http://127.0.0.1:30000}
ask() { curl --fail-with-body --silent --show-error -H 'Content-Type: application/json' "$@"; echo; }

echo "== which models are served"
ask "$url/v1/models"

echo "== a message, answered at once"
ask "$url/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
  "max_tokens": 24, "temperature": 0}'

echo "== the same as a stream: one line for each piece of text, then [DONE]"
ask --no-buffer "$url/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
  "max_tokens": 8, "temperature": 0, "stream": true}'

echo "== an answer that has to be JSON of this shape"
ask "$url/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "Name an animal."}],
  "max_tokens": 64, "temperature": 0,
  "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": {
    "type": "object", "required": ["legs"], "additionalProperties": false,
    "properties": {"legs": {"enum": [2, 4]}}}}}}'

echo "== plain text, continued"
ask "$url/v1/completions" -d '{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}'

echo "== a text as token ids"
ask "$url/tokenize" -d '{"prompt": "Once upon a time"}'

echo "== what the server has counted so far"
ask "$url/metrics" | grep -v '^#' | head -n 5
