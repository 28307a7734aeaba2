#include "server/syntax/tag_call_reader.h"

#include <algorithm>

#include "server/syntax/json_call_reader.h"

namespace kt::inline server {
namespace {

constexpr size_t kMostSpace = 64;  // between a value's end and the next tag; more is part of the value

std::string escaped_byte(char c) {
  const std::string quoted = nlohmann::json(std::string(1, c)).dump();
  return quoted.substr(1, quoted.size() - 2);
}

}  // namespace

bool is_call_name(std::string_view name) {
  return !name.empty() && name.find_first_of(" \n\r\t<>{}[]\"") == std::string_view::npos;
}

std::string trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \n\r\t");
  if (first == std::string_view::npos) return {};
  return std::string(text.substr(first, text.find_last_not_of(" \n\r\t") + 1 - first));
}

std::unique_ptr<CallReader> make_call_reader(ToolSyntax syntax, std::shared_ptr<const ArgumentTypes> types) {
  const CallSyntax& row = call_syntax(syntax);
  if (row.form == CallForm::kTags) return std::make_unique<TagCallReader>(row, std::move(types));
  return std::make_unique<JsonCallReader>(row);
}

std::unique_ptr<CallReader> make_item_reader(ToolSyntax syntax) {
  auto reader = std::make_unique<JsonCallReader>(call_syntax(syntax));
  reader->begin_item();
  return reader;
}

TagCallReader::TagCallReader(const CallSyntax& syntax, std::shared_ptr<const ArgumentTypes> types)
    : syntax_(syntax),
      tags_(syntax.tags),
      types_(std::move(types)),
      phase_(tags_.name_begin.empty() ? Phase::kName : Phase::kNameBegin) {}

CallReader::Step TagCallReader::read(char c) {
  switch (phase_) {
    case Phase::kNameBegin:
      return expect(c, tags_.name_begin, Phase::kName);
    case Phase::kName:
      return tags_.name_end.empty() ? name_until_tag(c) : name(c);
    case Phase::kBetween:
      return between(c);
    case Phase::kKey:
      return key(c);
    case Phase::kValueBegin: {
      const Step step = expect(c, tags_.value_begin, Phase::kValue);
      if (phase_ == Phase::kValue) begin_value(types_ ? types_->of(name_, key_) : TypeSet());
      return step;
    }
    case Phase::kValue:
      return value(c);
    case Phase::kTail:
      break;
  }
  if (word_.empty() && is_json_space(c)) {
    told_ = pushed_;
    return Step::kMore;
  }
  word_ += c;
  if (word_ == syntax_.markers.call_end) return Step::kDone;
  return syntax_.markers.call_end.starts_with(word_) ? Step::kMore : Step::kBad;
}

// White space, then the marker.
CallReader::Step TagCallReader::expect(char c, std::string_view marker, Phase then) {
  if (word_.empty() && is_json_space(c)) return Step::kMore;
  word_ += c;
  if (!marker.starts_with(word_)) return Step::kBad;
  if (word_ != marker) return Step::kMore;
  word_.clear();
  phase_ = then;
  return Step::kMore;
}

bool TagCallReader::end_name(std::string_view text) {
  name_ = trimmed(text);
  word_.clear();
  phase_ = Phase::kBetween;
  return is_call_name(name_);
}

CallReader::Step TagCallReader::name(char c) {
  word_ += c;
  const size_t at = word_.find(tags_.name_end[0]);
  if (at == std::string::npos) return word_.size() > kLongestCallName ? Step::kBad : Step::kMore;
  const std::string_view end = std::string_view(word_).substr(at);
  if (!tags_.name_end.starts_with(end)) return Step::kBad;
  if (end != tags_.name_end) return Step::kMore;
  return end_name(word_.substr(0, at)) ? Step::kMore : Step::kBad;
}

CallReader::Step TagCallReader::name_until_tag(char c) {
  if (word_.empty() && is_json_space(c)) return Step::kMore;
  if (c != '\n' && c != '<') {
    word_ += c;
    return word_.size() > kLongestCallName ? Step::kBad : Step::kMore;
  }
  if (!end_name(word_)) return Step::kBad;
  return c == '<' ? between(c) : Step::kMore;
}

// A key follows, or what ends the arguments; before a value came or after one whose end was not in doubt.
CallReader::Step TagCallReader::between(char c) {
  if (word_.empty() && is_json_space(c)) return Step::kMore;
  word_ += c;
  bool begins = false;
  for (const std::string_view tag : {tags_.key_begin, tags_.body_end, syntax_.markers.call_end}) {
    if (!tag.empty() && tag == word_) return follow(tag);
    begins |= tag.starts_with(word_);
  }
  return begins ? Step::kMore : Step::kBad;
}

CallReader::Step TagCallReader::follow(std::string_view tag) {
  word_.clear();
  if (tag == tags_.key_begin) {
    phase_ = Phase::kKey;
    return Step::kMore;
  }
  close();
  if (tag == syntax_.markers.call_end) return Step::kDone;
  phase_ = Phase::kTail;
  told_ = pushed_;
  return Step::kMore;
}

void TagCallReader::close() {
  arguments_ += keys_.empty() ? "{}" : "}";
  certain_ = true;
}

CallReader::Step TagCallReader::key(char c) {
  word_ += c;
  if (c == '\n' || word_.size() > kLongestCallName) return Step::kBad;
  const size_t at = word_.find(tags_.key_end[0]);
  if (at == std::string::npos) return Step::kMore;
  const std::string_view end = std::string_view(word_).substr(at);
  bool begins = false;
  for (const std::string_view marker : {tags_.key_end, tags_.string_key_end, tags_.json_key_end}) {
    begins |= marker.starts_with(end);
    if (marker.empty() || marker != end) continue;
    key_ = trimmed(std::string_view(word_).substr(0, at));
    if (key_.empty()) return Step::kBad;
    word_.clear();
    if (!tags_.value_begin.empty()) {
      phase_ = Phase::kValueBegin;
      return Step::kMore;
    }
    const bool by_schema = marker == tags_.key_end && types_;
    begin_value(marker == tags_.string_key_end ? TypeSet(TypeSet::kString)
                : by_schema                    ? types_->of(name_, key_)
                                               : TypeSet());
    return Step::kMore;
  }
  return begins ? Step::kMore : Step::kBad;
}

void TagCallReader::begin_value(TypeSet types) {
  phase_ = Phase::kValue;
  value_types_ = types;
  streams_ = types.only_string();
  fresh_ = true;
  begun_ = guarded_ = false;
  scanner_ = {};
  value_.clear();
  held_.clear();
  const bool first = keys_.empty();
  repeats_ = !keys_.insert(key_).second;
  if (!repeats_) {
    arguments_ += (first ? "{" : ", ") + json_of_bare(key_, TypeSet(TypeSet::kString)) + ": ";
    if (streams_) arguments_ += '"';
  }
  certain_ = true;
  told_ = pushed_;
}

// Whether the text is value_end, space and a tag that may follow, or may become that.
TagCallReader::Match TagCallReader::match_end(std::string_view text) {
  if (tags_.value_lines && text.starts_with('\n')) text.remove_prefix(1);
  if (text.size() < tags_.value_end.size() || !text.starts_with(tags_.value_end))
    return tags_.value_end.starts_with(text) ? Match::kPartly : Match::kNo;
  text.remove_prefix(tags_.value_end.size());
  const size_t space = std::min(text.find_first_not_of(" \n\r\t"), text.size());
  if (space > kMostSpace) return Match::kNo;
  text.remove_prefix(space);
  for (const std::string_view tag : {tags_.key_begin, tags_.body_end, syntax_.markers.call_end}) {
    if (tag.empty() || !tag.starts_with(text)) continue;
    follows_ = tag;
    return tag == text ? Match::kWhole : Match::kPartly;
  }
  return Match::kNo;
}

CallReader::Step TagCallReader::value(char c) {
  if (fresh_ && tags_.value_lines && c == '\n') {
    fresh_ = false;
    told_ = pushed_;
    return Step::kMore;
  }
  fresh_ = false;
  held_ += c;
  while (!held_.empty()) {
    const bool in_string = guarded_ && scanner_.in_string();
    const Match match = in_string ? Match::kNo : match_end(held_);
    if (match == Match::kPartly) break;
    if (match == Match::kNo) {
      value_byte(held_[0]);
      held_.erase(0, 1);
      continue;
    }
    finish_value();
    held_.clear();
    told_ = pushed_ - follows_.size();
    return follow(follows_);
  }
  if (streams_ || repeats_) told_ = pushed_ - held_.size();
  return Step::kMore;
}

void TagCallReader::value_byte(char c) {
  if (streams_) {
    if (repeats_) return;
    const bool plain = static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\';
    arguments_ += plain ? std::string(1, c) : escaped_byte(c);
    return;
  }
  if (!repeats_) value_ += c;
  if (!begun_ && !is_json_space(c)) {
    begun_ = true;
    const bool container =
        (c == '{' && value_types_.has(TypeSet::kObject)) || (c == '[' && value_types_.has(TypeSet::kArray));
    guarded_ = container || !value_types_.has(TypeSet::kString) || (c == '"' && value_types_.any());
  }
  if (guarded_ && scanner_.push(c) != JsonScanner::Step::kMore) guarded_ = false;
}

void TagCallReader::finish_value() {
  if (repeats_) return;
  if (streams_)
    arguments_ += '"';
  else
    arguments_ += json_of_bare(value_, value_types_);
  value_.clear();
}

void TagCallReader::end(AnswerEnd end) {
  if (phase_ != Phase::kValue) return;
  // The value is over if nothing but the next tag is missing.
  std::string_view rest = held_;
  if (tags_.value_lines && rest.starts_with('\n')) rest.remove_prefix(1);
  if (!rest.starts_with(tags_.value_end)) {
    for (const char c : std::exchange(held_, {})) value_byte(c);
    arguments_ += std::exchange(value_, {});
    return;
  }
  finish_value();
  // So is the call, unless another key may have been meant.
  const std::string tag = trimmed(rest.substr(tags_.value_end.size()));
  const bool ends = tags_.body_end.starts_with(tag) || syntax_.markers.call_end.starts_with(tag);
  if (end != AnswerEnd::kStop || !ends) return;
  close();
  phase_ = Phase::kTail;
}

}  // namespace kt::inline server
