#include "server/syntax/channel_reader.h"

#include <algorithm>
#include <array>

#include "server/syntax/json_call_reader.h"

namespace kt::inline server {
namespace {

constexpr std::string_view kHeaderSpace = " \n\r\t";
constexpr size_t kLongestHeader = 512;

// Whether a header may begin so; the text is what came so far.
bool may_be_header(std::string_view text) {
  for (const std::string_view begin :
       {kChannels.start, kChannels.channel, kChannels.message, std::string_view("to=")})
    if (text.starts_with(begin) || begin.starts_with(text)) return true;
  return false;
}

// The word behind a mark of a header; empty where there is none.
std::string_view word_behind(std::string_view header, std::string_view mark) {
  const size_t at = header.find(mark);
  if (at == std::string_view::npos) return {};
  header.remove_prefix(at + mark.size());
  header.remove_prefix(std::min(header.find_first_not_of(kHeaderSpace), header.size()));
  return header.substr(0, header.find_first_of(" \n\r\t<"));
}

bool has_end(std::string_view header) {
  return std::ranges::any_of(std::array{kChannels.end, kChannels.call, kChannels.answer_end},
                             [&](std::string_view end) { return header.find(end) != header.npos; });
}

// Whether an answer that ended so was within a header: its parts and nothing else, the last one perhaps begun.
bool is_header_begun(std::string_view text) {
  const auto skip_space = [&] {
    text.remove_prefix(std::min(text.find_first_not_of(kHeaderSpace), text.size()));
  };
  const auto skip_word = [&] {
    skip_space();
    const std::string_view word = text.substr(0, text.find_first_of(" \n\r\t<"));
    text.remove_prefix(word.size());
    return word;
  };
  const auto begins_one = [](std::string_view word, std::initializer_list<std::string_view> known) {
    return std::ranges::any_of(known, [&](std::string_view one) { return one.starts_with(word); });
  };
  bool any = false;
  for (skip_space(); !text.empty(); skip_space(), any = true) {
    if (text.starts_with(kChannels.start)) {
      text.remove_prefix(kChannels.start.size());
      if (!kChannels.role.starts_with(skip_word())) return false;
    } else if (text.starts_with(kChannels.channel)) {
      text.remove_prefix(kChannels.channel.size());
      if (!begins_one(skip_word(), {"analysis", "commentary", "final"})) return false;
    } else if (text.starts_with(kChannels.constrain)) {
      text.remove_prefix(kChannels.constrain.size());
      skip_word();
    } else if (text.starts_with("to=")) {
      skip_word();
    } else {
      return any && begins_one(text, {kChannels.start, kChannels.channel, kChannels.constrain,
                                      kChannels.message, "to="});
    }
  }
  return any;
}

}  // namespace

ChannelReader::ChannelReader(const ChatSyntax& syntax, const ReplyParser::Start& start, ReplyPieces& out)
    : thinks_(!syntax.think_begin.empty()),
      tools_(start.tools && syntax.tools == ToolSyntax::kGptOss),
      out_(out),
      content_({.tools = syntax.tools}, {.tools = start.tools, .types = start.types}, out) {
  if (start.thinking && thinks_) phase_ = Phase::kThought;
}

void ChannelReader::push(std::string_view text) {
  input_ += text;
  while (step()) {
  }
}

// Whether there may be more to do before more text comes.
bool ChannelReader::step() {
  switch (phase_) {
    case Phase::kHeader:
      return header();
    case Phase::kCall:
      return call();
    default:
      return text_of_message();
  }
}

bool ChannelReader::header() {
  const size_t first = std::min(input_.find_first_not_of(kHeaderSpace), input_.size());
  const std::string_view text = std::string_view(input_).substr(first);
  const size_t line = std::min(text.find('\n'), text.size()), end = text.find(kChannels.message);
  const bool too_long = end == std::string_view::npos
                            ? text.size() > kLongestHeader + kChannels.message.size()
                            : end > kLongestHeader;
  const std::string_view head = text.substr(0, end);
  const std::string_view role = word_behind(head, kChannels.start);
  const bool whole = end != std::string_view::npos;
  const bool stranger =
      whole && head.find(kChannels.start) != std::string_view::npos && role != kChannels.role;
  if (!may_be_header(text) || has_end(head) || too_long || stranger || line < head.size() ||
      first > kLongestHeader) {
    // No header: its first byte is text, so that a marker in it is not found again.
    const size_t taken = std::min({first + 1, input_.size(), kLongestHeader + 1});
    begin_text(Phase::kContent);
    add_text(std::string_view(input_).substr(0, taken));
    input_.erase(0, taken);
    return true;
  }
  if (!whole) return false;
  const std::string header(head);
  input_.erase(0, first + end + kChannels.message.size());
  begin_message(header);
  return true;
}

void ChannelReader::begin_message(std::string_view header) {
  const std::string_view whom = word_behind(header, "to="), channel = word_behind(header, kChannels.channel);
  if (whom.empty()) return begin_text(channel == "analysis" && thinks_ ? Phase::kThought : Phase::kContent);
  header_ = std::string(header) + std::string(kChannels.message);
  const std::string name(whom.substr(std::min(kChannels.functions.size(), whom.size())));
  if (tools_ && whom.starts_with(kChannels.functions) && is_call_name(name)) {
    phase_ = Phase::kCall;
    body_.clear();
    reader_ = std::make_unique<JsonCallReader>(call_syntax(ToolSyntax::kGptOss), name);
    return;
  }
  // To somebody we do not know: all of it is content.
  begin_text(Phase::kContent);
  add_text(header_);
}

void ChannelReader::begin_text(Phase phase) {
  phase_ = phase;
  gap_ = phase == Phase::kThought ? any_thought_ : any_content_;
}

void ChannelReader::add_text(std::string_view text) {
  if (text.empty()) return;
  const std::string_view gap = gap_ ? "\n\n" : "";
  gap_ = false;
  if (phase_ == Phase::kThought) {
    out_.add(ReplyPiece::Kind::kReasoning, gap);
    out_.add(ReplyPiece::Kind::kReasoning, text);
    any_thought_ = true;
    return;
  }
  content_.push(gap);
  content_.push(text);
  any_content_ = true;
}

bool ChannelReader::text_of_message() {
  const FoundMarker found = find_marker(
      input_, {kChannels.end, kChannels.call, kChannels.answer_end, kChannels.start, kChannels.channel});
  add_text(std::string_view(input_).substr(0, found.at));
  // A message without an end ends where the next one begins.
  const bool begins = found.marker == kChannels.start || found.marker == kChannels.channel;
  input_.erase(0, found.at + (begins ? 0 : found.marker.size()));
  if (found.marker.empty()) return false;
  phase_ = Phase::kHeader;
  return true;
}

bool ChannelReader::call() {
  size_t at = 0, told = reader_->told();
  while (at < input_.size() && !reader_->complete()) {
    const CallReader::Step step = reader_->push(input_[at]);
    body_ += input_[at++];
    if (step == CallReader::Step::kBad) {
      input_.erase(0, at);
      refuse_call();
      return true;
    }
    body_.erase(0, reader_->told() - told);
    told = reader_->told();
  }
  input_.erase(0, at);
  out_.add_call(*reader_);
  if (!reader_->complete()) return false;
  input_.erase(0, std::min(input_.find_first_not_of(kHeaderSpace), input_.size()));
  if (input_.empty()) return false;  // still white space, perhaps
  reader_.reset();
  begin_text(Phase::kContent);
  return true;
}

void ChannelReader::refuse_call() {
  out_.add_call(*reader_);
  const bool certain = reader_->certain();
  reader_.reset();
  begin_text(Phase::kContent);
  if (!certain) add_text(header_);
  input_.insert(0, body_);
}

void ChannelReader::flush(AnswerEnd end) {
  if (phase_ == Phase::kCall && !reader_->certain()) {
    refuse_call();
    while (step()) {
    }
  }
  if (phase_ == Phase::kCall) {
    reader_->end(end);
    if (!reader_->complete()) out_.set_cut_off();
    out_.add_call(*reader_);
  } else if (phase_ == Phase::kHeader) {
    begin_text(Phase::kContent);
    if (input_.find_first_not_of(kHeaderSpace) != std::string::npos && !is_header_begun(input_))
      add_text(input_);
  } else {
    add_text(input_);
  }
  input_.clear();
  content_.flush(end);
}

}  // namespace kt::inline server
