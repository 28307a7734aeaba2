// What a load generator wants to know of one event of a streamed completion, without parsing all of it: the
// generator shares the cores with the server it measures.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kt::inline bench {

struct TokenUsage {
  int64_t prompt = 0, completion = 0;
};

struct StreamEvent {
  bool done = false;      // "[DONE]"
  bool has_text = false;  // of the answer or of its reasoning
  bool has_choice = false;
  std::optional<TokenUsage> usage = {};
  std::string error = {};  // the message of an error in the middle of the stream
};

// `data` is an event's data: a chunk of OpenAI's API, of chat or of plain completions.
StreamEvent read_stream_event(std::string_view data);

// "message" of {"error": {"message": ...}}, or of the other shapes servers use; else the beginning of the
// body.
std::string error_message(std::string_view body);

}  // namespace kt::inline bench
