// The state machine of ReplyParser. Markers are found in what came so far; bytes of a call go to a CallReader
// and stay until the call is certain, because a malformed one is read again as content.
#include "base/error.h"
#include "server/call_reader.h"
#include "server/chat_syntax.h"

namespace kt {
namespace {

using Kind = ReplyPiece::Kind;
constexpr std::string_view kSpace = " \n\r\t";

}  // namespace

struct ReplyParser::State {
  enum class Phase { kStart, kThoughtStart, kThought, kContent, kSection, kCall };

  ChatSyntax syntax;
  ToolMarkers markers;
  bool tools = false;
  Phase phase = Phase::kContent;

  std::string input;        // what came and is not settled
  size_t at = 0;            // all before is read
  size_t mark = 0;          // kSection, kCall: all before is settled
  size_t begin_size = 0;    // of the marker at `mark`, while the call is not certain
  std::string gap;          // white space that goes out before the next text, if there is one
  bool drop_space = false;  // white space up to the next text is left out
  bool any_content = false;
  int calls = 0;
  bool cut_off = false;
  std::optional<CallReader> reader;
  std::vector<ReplyPiece> out;

  void add(Kind kind, std::string_view text);
  void add_content(std::string_view text);
  void add_thought(std::string_view text);
  void run();
  bool step();
  bool start();
  bool thought_start();
  bool thought();
  bool content();
  bool section();
  bool call();
  void tell_call();
  void end_call();
  void refuse_call();
  void skip_space();
  std::string_view rest() const { return std::string_view(input).substr(at); }

  // Where the first of the markers begins in rest(), or could begin if more text came.
  struct Found {
    size_t at = 0;
    std::string_view marker = {};  // empty: not yet
  };
  Found find(std::initializer_list<std::string_view> wanted) const;
};

void ReplyParser::State::add(Kind kind, std::string_view text) {
  if (text.empty()) return;
  const int number = kind == Kind::kCall || kind == Kind::kArguments ? calls - 1 : 0;
  if (!out.empty() && kind != Kind::kCall && out.back().kind == kind && out.back().call == number)
    out.back().text += text;
  else
    out.push_back({.kind = kind, .call = number, .text = std::string(text)});
}

// White space waits while a call may follow.
void ReplyParser::State::add_content(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (drop_space) text.remove_prefix(std::min(first, text.size()));
  if (text.empty()) return;
  if (tools && first == std::string_view::npos) {
    gap += text;
    return;
  }
  const size_t end = tools ? text.find_last_not_of(kSpace) + 1 : text.size();
  add(Kind::kContent, gap);
  add(Kind::kContent, text.substr(0, end));
  gap = text.substr(end);
  drop_space = false;
  any_content = true;
}

void ReplyParser::State::add_thought(std::string_view text) {
  const size_t last = text.find_last_not_of(kSpace);
  if (last == std::string_view::npos) {
    gap += text;
    return;
  }
  add(Kind::kReasoning, gap);
  add(Kind::kReasoning, text.substr(0, last + 1));
  gap = text.substr(last + 1);
}

ReplyParser::State::Found ReplyParser::State::find(std::initializer_list<std::string_view> wanted) const {
  const std::string_view text = rest();
  for (size_t place = text.find('<'); place != std::string_view::npos; place = text.find('<', place + 1)) {
    const std::string_view here = text.substr(place);
    for (const std::string_view marker : wanted) {
      if (marker.empty()) continue;
      if (here.starts_with(marker)) return {.at = place, .marker = marker};
      if (marker.starts_with(here)) return {.at = place};
    }
  }
  return {.at = text.size()};
}

void ReplyParser::State::run() {
  while (step()) {
  }
  const size_t settled = phase == Phase::kSection || phase == Phase::kCall ? mark : at;
  input.erase(0, settled);
  at -= settled;
  mark = 0;
}

// Whether there may be more to do before more text comes.
bool ReplyParser::State::step() {
  switch (phase) {
    case Phase::kStart:
      return start();
    case Phase::kThoughtStart:
      return thought_start();
    case Phase::kThought:
      return thought();
    case Phase::kContent:
      return content();
    case Phase::kSection:
      return section();
    case Phase::kCall:
      return call();
  }
  return false;
}

void ReplyParser::State::skip_space() { at = std::min(input.find_first_not_of(kSpace, at), input.size()); }

bool ReplyParser::State::start() {
  const size_t before = at;
  skip_space();
  gap.append(input, before, at - before);
  if (rest().starts_with(syntax.think_begin)) {
    at += syntax.think_begin.size();
    gap.clear();
    phase = Phase::kThoughtStart;
    return true;
  }
  if (syntax.think_begin.starts_with(rest())) return false;
  phase = Phase::kContent;
  return true;
}

// Some models open the thought again that the prompt has opened.
bool ReplyParser::State::thought_start() {
  skip_space();
  if (rest().starts_with(syntax.think_begin)) {
    at += syntax.think_begin.size();
    return true;
  }
  if (syntax.think_begin.starts_with(rest())) return false;
  phase = Phase::kThought;
  return true;
}

bool ReplyParser::State::thought() {
  const Found found = find({syntax.think_end});
  add_thought(rest().substr(0, found.at));
  at += found.at + found.marker.size();
  if (found.marker.empty()) return false;
  gap.clear();
  drop_space = true;
  phase = Phase::kContent;
  return true;
}

bool ReplyParser::State::content() {
  Found found{.at = rest().size()};
  if (tools) found = find({markers.section_begin, markers.call_begin, calls > 0 ? markers.section_end : ""});
  add_content(rest().substr(0, found.at));
  at += found.at;
  if (found.marker.empty()) return false;
  mark = at;
  begin_size = found.marker.size();
  at += begin_size;
  if (found.marker == markers.section_end) {
    drop_space = true;
  } else if (found.marker == markers.section_begin) {
    phase = Phase::kSection;
  } else {
    phase = Phase::kCall;
    reader.emplace(syntax.tools);
  }
  return true;
}

bool ReplyParser::State::section() {
  skip_space();
  if (rest().starts_with(markers.call_begin)) {
    at += markers.call_begin.size();
    phase = Phase::kCall;
    reader.emplace(syntax.tools);
    return true;
  }
  if (markers.call_begin.starts_with(rest())) return false;
  refuse_call();
  return true;
}

bool ReplyParser::State::call() {
  while (at < input.size()) {
    const CallReader::Step step = reader->push(input[at]);
    if (step == CallReader::Step::kBad) {
      refuse_call();
      return true;
    }
    ++at;
    if (reader->settled()) mark = at;
    if (step != CallReader::Step::kDone) continue;
    tell_call();
    end_call();
    return true;
  }
  tell_call();
  return false;
}

void ReplyParser::State::tell_call() {
  if (const std::optional<std::string> name = reader->take_name()) {
    ++calls;
    add(Kind::kCall, *name);
  }
  add(Kind::kArguments, reader->take_arguments());
}

void ReplyParser::State::end_call() {
  reader.reset();
  phase = Phase::kContent;
  drop_space = true;
  if (!any_content) gap.clear();
}

void ReplyParser::State::refuse_call() {
  if (reader) tell_call();
  if (reader && reader->certain()) {
    const bool complete = reader->complete();
    at = mark;
    end_call();
    drop_space = complete;
    return;
  }
  drop_space = false;
  add_content(std::string_view(input).substr(mark, begin_size));
  at = mark + begin_size;
  reader.reset();
  phase = Phase::kContent;
}

ReplyParser::ReplyParser(ChatSyntax syntax, Start start) : state_(std::make_unique<State>()) {
  const bool thinks = !syntax.think_begin.empty() && !syntax.think_end.empty();
  KT_CHECK(!thinks || (syntax.think_begin[0] == '<' && syntax.think_end[0] == '<'));
  state_->markers = tool_markers(syntax.tools);
  state_->tools = start.tools && syntax.tools != ToolSyntax::kNone;
  if (thinks) state_->phase = start.thinking ? State::Phase::kThoughtStart : State::Phase::kStart;
  state_->syntax = std::move(syntax);
}

ReplyParser::~ReplyParser() = default;
ReplyParser::ReplyParser(ReplyParser&&) noexcept = default;
ReplyParser& ReplyParser::operator=(ReplyParser&&) noexcept = default;

int ReplyParser::calls() const { return state_->calls; }
bool ReplyParser::cut_off() const { return state_->cut_off; }

std::vector<ReplyPiece> ReplyParser::push(std::string_view text) {
  state_->input += text;
  state_->run();
  return std::exchange(state_->out, {});
}

std::vector<ReplyPiece> ReplyParser::flush() {
  State& state = *state_;
  using Phase = State::Phase;
  while (state.phase == Phase::kSection || (state.phase == Phase::kCall && !state.reader->certain())) {
    state.refuse_call();
    state.run();
  }
  state.cut_off = state.phase == Phase::kCall;
  const std::string left(state.rest());
  switch (state.phase) {
    case Phase::kThoughtStart:
    case Phase::kThought:
      state.add_thought(left);
      state.add(Kind::kReasoning, state.gap);
      break;
    case Phase::kStart:
    case Phase::kContent:
      state.add_content(left);
      if (!state.drop_space) state.add(Kind::kContent, state.gap);
      break;
    default:
      break;
  }
  state.input.clear();
  state.at = 0;
  state.gap.clear();
  return std::exchange(state.out, {});
}

}  // namespace kt
