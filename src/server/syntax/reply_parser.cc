// ReplyParser: the reader that a syntax asks for, and the pieces it makes.
#include "server/syntax/channel_reader.h"
#include "server/syntax/marker_reader.h"

namespace kt::inline server {

void ReplyPieces::add(ReplyPiece::Kind kind, std::string_view text) {
  using Kind = ReplyPiece::Kind;
  if (text.empty()) return;
  const int number = kind == Kind::kCall || kind == Kind::kArguments ? calls_ - 1 : 0;
  if (!pieces_.empty() && kind != Kind::kCall && pieces_.back().kind == kind && pieces_.back().call == number)
    pieces_.back().text += text;
  else
    pieces_.push_back({.kind = kind, .call = number, .text = std::string(text)});
}

void ReplyPieces::add_call(CallReader& reader) {
  if (const std::optional<std::string> name = reader.take_name()) {
    ++calls_;
    add(ReplyPiece::Kind::kCall, *name);
    if (!reader.id().empty() && ids_.insert(reader.id()).second) pieces_.back().id = reader.id();
  }
  add(ReplyPiece::Kind::kArguments, reader.take_arguments());
}

FoundMarker find_marker(std::string_view text, std::initializer_list<std::string_view> wanted) {
  std::string firsts;
  for (const std::string_view marker : wanted)
    if (!marker.empty() && firsts.find(marker[0]) == std::string::npos) firsts += marker[0];
  for (size_t place = text.find_first_of(firsts); place != std::string_view::npos;
       place = text.find_first_of(firsts, place + 1)) {
    const std::string_view here = text.substr(place);
    for (const std::string_view marker : wanted) {
      if (marker.empty()) continue;
      if (here.starts_with(marker)) return {.at = place, .marker = marker};
      if (marker.starts_with(here)) return {.at = place};
    }
  }
  return {.at = text.size()};
}

struct ReplyParser::State {
  ReplyPieces pieces;
  std::unique_ptr<AnswerReader> reader;
};

ReplyParser::ReplyParser(ChatSyntax syntax, const Start& start) : state_(std::make_unique<State>()) {
  if (syntax.channels)
    state_->reader = std::make_unique<ChannelReader>(syntax, start, state_->pieces);
  else
    state_->reader = std::make_unique<MarkerReader>(std::move(syntax), start, state_->pieces);
}

ReplyParser::~ReplyParser() = default;
ReplyParser::ReplyParser(ReplyParser&&) noexcept = default;
ReplyParser& ReplyParser::operator=(ReplyParser&&) noexcept = default;

int ReplyParser::calls() const { return state_->pieces.calls(); }
bool ReplyParser::cut_off() const { return state_->pieces.cut_off(); }

std::vector<ReplyPiece> ReplyParser::push(std::string_view text) {
  state_->reader->push(text);
  return state_->pieces.take();
}

std::vector<ReplyPiece> ReplyParser::flush(AnswerEnd end) {
  state_->reader->flush(end);
  return state_->pieces.take();
}

}  // namespace kt::inline server
