#include "server/syntax/marker_reader.h"

#include <algorithm>

namespace kt::inline server {
namespace {

constexpr std::string_view kBlank = " \n\r\t", kFrameGap = "\n\n";

// What an answer of frames was cut off in, and tells nothing.
bool is_frame_begun(std::string_view text) {
  return text.starts_with(kFrames.role) && kFrames.begin.starts_with(text);
}

}  // namespace

MarkerReader::MarkerReader(ChatSyntax syntax, const ReplyParser::Start& start, ReplyPieces& out)
    : syntax_(std::move(syntax)),
      calls_(call_syntax(syntax_.tools)),
      markers_(calls_.markers),
      tools_(start.tools && !markers_.call_begin.empty()),
      types_(start.types),
      out_(out) {
  const bool thinks = !syntax_.think_begin.empty() && !syntax_.think_end.empty();
  if (thinks || syntax_.frames) phase_ = start.thinking && thinks ? Phase::kThoughtStart : Phase::kStart;
}

// White space waits while a call may follow.
void MarkerReader::add_content(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlank);
  if (drop_space_) text.remove_prefix(std::min(first, text.size()));
  if (text.empty()) return;
  if (tools_ && first == std::string_view::npos) {
    gap_ += text;
    return;
  }
  const size_t end = tools_ ? text.find_last_not_of(kBlank) + 1 : text.size();
  out_.add(ReplyPiece::Kind::kContent, gap_);
  out_.add(ReplyPiece::Kind::kContent, text.substr(0, end));
  gap_ = text.substr(end);
  drop_space_ = parts_ = false;
  any_content_ = true;
}

void MarkerReader::add_thought(std::string_view text) {
  const size_t last = text.find_last_not_of(kBlank);
  if (last == std::string_view::npos) {
    gap_ += text;
    return;
  }
  out_.add(ReplyPiece::Kind::kReasoning, gap_);
  out_.add(ReplyPiece::Kind::kReasoning, text.substr(0, last + 1));
  gap_ = text.substr(last + 1);
  any_thought_ = true;
  parts_ = false;
}

void MarkerReader::run() {
  while (step()) {
  }
  const size_t settled = phase_ == Phase::kSection || phase_ == Phase::kCall ? mark_ : at_;
  input_.erase(0, settled);
  at_ -= settled;
  mark_ -= std::min(mark_, settled);
  call_at_ -= static_cast<ptrdiff_t>(settled);
}

// Whether there may be more to do before more text comes.
bool MarkerReader::step() {
  switch (phase_) {
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
    case Phase::kList:
      return list();
  }
  return false;
}

void MarkerReader::skip_space() { at_ = std::min(input_.find_first_not_of(kBlank, at_), input_.size()); }

bool MarkerReader::start() {
  if (syntax_.frames) return frame_start();
  const size_t before = at_;
  skip_space();
  gap_.append(input_, before, at_ - before);
  // Some models write the end alone for no thought at all.
  for (const std::string_view marker : {syntax_.think_begin, syntax_.think_end}) {
    if (marker.starts_with(rest()) && rest() != marker) return false;
    if (!rest().starts_with(marker)) continue;
    at_ += marker.size();
    gap_.clear();
    drop_space_ = true;
    phase_ = marker == syntax_.think_begin ? Phase::kThoughtStart : Phase::kContent;
    return true;
  }
  phase_ = Phase::kContent;
  return true;
}

bool MarkerReader::frame_start() {
  const size_t before = at_;
  skip_space();
  if (!drop_space_) gap_.append(input_, before, at_ - before);
  for (const std::string_view marker :
       {kFrames.begin, kFrames.end, kFrames.answer_end, kFrames.text, kFrames.thought}) {
    if (marker.starts_with(rest()) && rest() != marker) return false;
    if (!rest().starts_with(marker)) continue;
    at_ += marker.size();
    if (marker == kFrames.thought && !syntax_.think_begin.empty()) {
      gap_ = any_thought_ ? kFrameGap : "";
      parts_ = any_thought_;
      phase_ = Phase::kThoughtStart;
    } else if (marker == kFrames.text || marker == kFrames.thought) {
      gap_.clear();
      begin_text();
    }
    return true;
  }
  begin_text();
  return true;
}

void MarkerReader::begin_text() {
  phase_ = Phase::kContent;
  if (!any_content_) return;
  gap_ = kFrameGap;
  parts_ = true;
}

// Some models open the thought again that the prompt has opened.
bool MarkerReader::thought_start() {
  skip_space();
  if (rest().starts_with(syntax_.think_begin)) {
    at_ += syntax_.think_begin.size();
    return true;
  }
  if (syntax_.think_begin.starts_with(rest())) return false;
  phase_ = Phase::kThought;
  return true;
}

bool MarkerReader::thought() {
  const bool may_call = tools_ && calls_.ends_thought;
  const std::string_view none;
  const FoundMarker found = find_marker(
      rest(), {syntax_.think_end, may_call ? markers_.section_begin : none,
               syntax_.frames ? kFrames.begin : none, syntax_.frames ? kFrames.answer_end : none});
  add_thought(rest().substr(0, found.at));
  at_ += found.at;
  if (found.marker.empty()) return false;
  if (found.marker == syntax_.think_end) at_ += found.marker.size();
  gap_.clear();
  parts_ = false;
  drop_space_ = true;
  phase_ = syntax_.frames ? Phase::kStart : Phase::kContent;
  return true;
}

bool MarkerReader::content() {
  FoundMarker found{.at = rest().size()};
  if (tools_ || syntax_.frames) {
    const bool may_call = tools_ && (in_section_ || !calls_.needs_section);
    const auto only = [](bool wanted, std::string_view marker) {
      return wanted ? marker : std::string_view();
    };
    found = find_marker(
        rest(), {only(tools_, markers_.section_begin), only(may_call, markers_.call_begin),
                 only(tools_ && out_.calls() > 0, markers_.section_end), only(syntax_.frames, kFrames.begin),
                 only(syntax_.frames, kFrames.end), only(syntax_.frames, kFrames.answer_end)});
  }
  add_content(rest().substr(0, found.at));
  at_ += found.at;
  if (found.marker.empty()) return false;
  if (syntax_.frames &&
      (found.marker == kFrames.begin || found.marker == kFrames.end || found.marker == kFrames.answer_end)) {
    phase_ = Phase::kStart;
    return true;
  }
  mark_ = at_;
  begin_size_ = found.marker.size();
  at_ += begin_size_;
  if (found.marker == markers_.section_end) {
    drop_space_ = true;
    in_section_ = false;
  } else if (found.marker == markers_.section_begin) {
    phase_ = Phase::kSection;
  } else {
    begin_call(make_call_reader(syntax_.tools, types_));
  }
  return true;
}

bool MarkerReader::section() {
  skip_space();
  if (rest().starts_with(markers_.call_begin)) {
    at_ += markers_.call_begin.size();
    in_section_ = true;
    begin_call(make_call_reader(syntax_.tools, types_));
    return true;
  }
  if (markers_.call_begin.starts_with(rest())) return false;
  refuse_call();
  return true;
}

void MarkerReader::begin_call(std::unique_ptr<CallReader> reader) {
  phase_ = Phase::kCall;
  call_at_ = static_cast<ptrdiff_t>(at_);
  reader_ = std::move(reader);
}

bool MarkerReader::call() {
  while (at_ < input_.size()) {
    const CallReader::Step step = reader_->push(input_[at_]);
    if (step == CallReader::Step::kBad) {
      refuse_call();
      return true;
    }
    ++at_;
    if (reader_->told() > 0) mark_ = static_cast<size_t>(call_at_ + static_cast<ptrdiff_t>(reader_->told()));
    if (step != CallReader::Step::kDone) continue;
    out_.add_call(*reader_);
    const bool listed = reader_->listed();
    end_call();
    if (listed) phase_ = Phase::kList;
    return true;
  }
  out_.add_call(*reader_);
  return false;
}

// Behind a call of a list. The comma belongs to the next one, and is content with it if that is malformed.
bool MarkerReader::list() {
  skip_space();
  if (rest().empty()) return false;
  const char c = input_[at_];
  phase_ = Phase::kContent;
  if (c == ']') ++at_;
  if (c != ',') return true;
  mark_ = at_++;
  begin_size_ = 1;
  begin_call(make_item_reader(syntax_.tools));
  return true;
}

void MarkerReader::end_call() {
  reader_.reset();
  phase_ = Phase::kContent;
  drop_space_ = true;
  if (!any_content_) gap_.clear();
}

void MarkerReader::refuse_call() {
  if (reader_) out_.add_call(*reader_);
  if (reader_ && reader_->certain()) {
    const bool complete = reader_->complete();
    at_ = mark_;
    end_call();
    drop_space_ = complete;
    return;
  }
  in_section_ = in_section_ && out_.calls() > 0;
  drop_space_ = false;
  add_content(std::string_view(input_).substr(mark_, begin_size_));
  at_ = mark_ + begin_size_;
  reader_.reset();
  phase_ = Phase::kContent;
}

void MarkerReader::push(std::string_view text) {
  input_ += text;
  run();
}

void MarkerReader::flush(AnswerEnd end) {
  while (phase_ == Phase::kSection || (phase_ == Phase::kCall && !reader_->certain())) {
    refuse_call();
    run();
  }
  const std::string left(syntax_.frames && is_frame_begun(rest()) ? "" : rest());
  switch (phase_) {
    case Phase::kThoughtStart:
    case Phase::kThought:
      add_thought(left);
      if (!parts_) out_.add(ReplyPiece::Kind::kReasoning, gap_);
      break;
    case Phase::kStart:
    case Phase::kContent:
      add_content(left);
      if (!drop_space_ && !parts_) out_.add(ReplyPiece::Kind::kContent, gap_);
      break;
    case Phase::kCall:
      reader_->end(end);
      if (!reader_->complete()) out_.set_cut_off();
      out_.add_call(*reader_);
      break;
    case Phase::kSection:
    case Phase::kList:
      break;
  }
  input_.clear();
  at_ = 0;
  gap_.clear();
}

}  // namespace kt::inline server
