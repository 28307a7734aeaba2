// Hugging Face's tokenizer.json, as TokenizerParts. What a type name asks for is done as tokenizers does it
// or refused by that name.
#include <algorithm>

#include "base/error.h"
#include "text/json.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMaxSteps = 64;

// A value and where it stands, "tokenizer.json: pre_tokenizer.pretokenizers[0]".
class At {
 public:
  At(const Json& value, std::string where) : value_(value), where_(std::move(where)) {}

  template <typename... Args>
  [[noreturn]] void bad(TextPattern<sizeof...(Args)> pattern, const Args&... args) const {
    fail("{}: {}", where_, text(pattern, args...));
  }
  const Json& value() const { return value_; }
  bool is_null() const { return value_.is_null(); }
  bool has(const char* key) const {
    return value_.is_object() && value_.contains(key) && !value_[key].is_null();
  }

  At operator[](const char* key) const {
    if (!value_.is_object()) bad("expected an object, found {}", value_.type_name());
    const auto found = value_.find(key);
    if (found == value_.end()) bad("\"{}\" is missing", key);
    return At(*found, where_.ends_with(':') ? where_ + " " + key : where_ + "." + key);
  }
  std::vector<At> items() const {
    if (!value_.is_array()) bad("expected an array, found {}", value_.type_name());
    std::vector<At> all;
    for (size_t i = 0; i < value_.size(); ++i) all.emplace_back(value_[i], text("{}[{}]", where_, i));
    return all;
  }
  const std::string& string() const {
    if (!value_.is_string()) bad("expected a string, found {}", value_.type_name());
    return value_.get_ref<const std::string&>();
  }
  TokenId id() const {
    if (!value_.is_number_integer()) bad("expected an id, found {}", value_.type_name());
    const auto id = value_.is_number_unsigned() ? value_.get<uint64_t>() : static_cast<uint64_t>(-1);
    if (id > 0x7FFFFFFF) bad("expected an id, found {}", value_.dump());
    return static_cast<TokenId>(id);
  }
  bool flag(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!value_[key].is_boolean())
      (*this)[key].bad("expected true or false, found {}", value_[key].type_name());
    return value_[key].get<bool>();
  }
  uint64_t count(const char* key) const {
    const At field = (*this)[key];
    if (!field.value_.is_number_unsigned()) field.bad("expected a count, found {}", field.value_.type_name());
    return field.value_.get<uint64_t>();
  }
  std::string type() const { return (*this)["type"].string(); }
  const std::string& where() const { return where_; }

 private:
  const Json& value_;
  std::string where_;
};

// The steps of a value that is one step or a Sequence of them under `key`, in order.
void flatten(const At& at, const char* key, std::vector<At>& out, int depth = 0) {
  if (at.is_null()) return;
  if (depth > 8) at.bad("sequences nested deeper than 8");
  if (out.size() >= kMaxSteps) at.bad("more than {} steps", kMaxSteps);
  if (at.type() != "Sequence") return out.push_back(at);
  for (const At& item : at[key].items()) flatten(item, key, out, depth + 1);
}

std::string escaped(std::string_view literal) {
  std::string out;
  for (char c : literal) {
    if (std::string_view("\\^$.|?*+()[]{}&-").find(c) != std::string_view::npos) out.push_back('\\');
    out.push_back(c);
  }
  return out;
}

Regex read_pattern(const At& at) {
  const At pattern = at["pattern"];
  try {
    if (pattern.has("String")) {
      if (pattern["String"].string().empty()) pattern.bad("an empty string");
      return Regex(escaped(pattern["String"].string()));
    }
    return Regex(pattern["Regex"].string());
  } catch (const Error& error) {
    at.bad("{}", error.what());
  }
}

void read_normalizer(const At& at, TokenizerParts& parts) {
  std::vector<At> steps;
  flatten(at, "normalizers", steps);
  for (const At& step : steps) {
    const std::string type = step.type();
    if (type == "NFC") {
      parts.normal_steps.push_back(NormalForm::kNfc);
    } else if (type == "NFD") {
      parts.normal_steps.push_back(NormalForm::kNfd);
    } else if (type == "NFKC") {
      parts.normal_steps.push_back(NormalForm::kNfkc);
    } else if (type == "NFKD") {
      parts.normal_steps.push_back(NormalForm::kNfkd);
    } else if (type == "Replace") {
      parts.normal_steps.push_back(ReplaceStep{read_pattern(step), step["content"].string()});
    } else if (type == "Prepend") {
      parts.normal_steps.push_back(PrependStep{step["prepend"].string()});
    } else if (type == "Strip") {
      parts.normal_steps.push_back(StripStep{step.flag("strip_left", true), step.flag("strip_right", true)});
    } else {
      step.bad("a normalizer of type \"{}\" is not read", printable(type));
    }
  }
}

SplitBehaviour read_behaviour(const At& at) {
  constexpr std::pair<std::string_view, SplitBehaviour> kNames[] = {
      {"Isolated", SplitBehaviour::kIsolated},
      {"Removed", SplitBehaviour::kRemoved},
      {"MergedWithPrevious", SplitBehaviour::kMergedWithPrevious},
      {"MergedWithNext", SplitBehaviour::kMergedWithNext},
      {"Contiguous", SplitBehaviour::kContiguous}};
  for (const auto& [name, behaviour] : kNames)
    if (at.string() == name) return behaviour;
  at.bad("a behavior \"{}\" is not known", printable(at.string()));
}

MetaspaceStep read_metaspace(const At& at) {
  const std::string replacement = at["replacement"].string();
  const Utf8Step first = decode_utf8(replacement);
  if (!first.valid || first.bytes != replacement.size()) at["replacement"].bad("expected one character");
  MetaspaceStep step{
      .replacement = replacement, .pattern = Regex(escaped(replacement)), .split = at.flag("split", true)};
  const std::string scheme = at.has("prepend_scheme")            ? at["prepend_scheme"].string()
                             : at.flag("add_prefix_space", true) ? "always"
                                                                 : "never";
  if (scheme == "first")
    step.prepend = MetaspaceStep::Prepend::kFirst;
  else if (scheme == "never")
    step.prepend = MetaspaceStep::Prepend::kNever;
  else if (scheme != "always")
    at["prepend_scheme"].bad("\"{}\" is not known", printable(scheme));
  return step;
}

void read_pre_tokenizer(const At& at, TokenizerParts& parts) {
  std::vector<At> steps;
  flatten(at, "pretokenizers", steps);
  for (const At& step : steps) {
    const std::string type = step.type();
    if (parts.bpe.bytes) step.bad("a step after ByteLevel, \"{}\", is not read", printable(type));
    if (type == "Split") {
      parts.word_steps.push_back(
          SplitStep{read_pattern(step), read_behaviour(step["behavior"]), step.flag("invert", false)});
    } else if (type == "ByteLevel") {
      if (step.flag("add_prefix_space", true)) parts.word_steps.push_back(PrefixSpaceStep{});
      if (step.flag("use_regex", true)) parts.word_steps.push_back(SplitStep{Regex(kGpt2Pattern)});
      parts.bpe.bytes = true;
    } else if (type == "Digits") {
      const bool single = step.flag("individual_digits", false);
      parts.word_steps.push_back(
          SplitStep{Regex("\\p{N}"), single ? SplitBehaviour::kIsolated : SplitBehaviour::kContiguous});
    } else if (type == "Punctuation") {
      parts.word_steps.push_back(SplitStep{Regex("[\\p{P}$+<=>^`|~]"), step.has("behavior")
                                                                           ? read_behaviour(step["behavior"])
                                                                           : SplitBehaviour::kIsolated});
    } else if (type == "WhitespaceSplit") {
      parts.word_steps.push_back(SplitStep{Regex("\\s"), SplitBehaviour::kRemoved});
    } else if (type == "Whitespace") {
      parts.word_steps.push_back(SplitStep{Regex("\\w+|[^\\w\\s]+"), SplitBehaviour::kRemoved, true});
    } else if (type == "Metaspace") {
      parts.word_steps.push_back(read_metaspace(step));
    } else {
      step.bad("a pre-tokenizer of type \"{}\" is not read", printable(type));
    }
  }
}

void read_decoder(const At& at, TokenizerParts& parts) {
  std::vector<At> steps;
  flatten(at, "decoders", steps);
  Decoding& how = parts.decoding;
  bool fused = false;
  // tokenizers would put a space between tokens; no model means that.
  if (steps.empty()) how.byte_level = parts.bpe.bytes;
  for (const At& step : steps) {
    const std::string type = step.type();
    if (fused && type != "Strip") step.bad("a decoder \"{}\" after Fuse is not read", printable(type));
    if (type == "ByteLevel") {
      how.byte_level = true;
    } else if (type == "ByteFallback") {
      how.byte_fallback = true;
    } else if (type == "Fuse") {
      fused = true;
    } else if (type == "Replace") {
      const At pattern = step["pattern"];
      if (pattern["String"].string().empty()) pattern.bad("an empty string");
      how.replacements.emplace_back(pattern["String"].string(), step["content"].string());
    } else if (type == "Strip") {
      if (!fused || step.count("stop") != 0) step.bad("only a Strip of the start, after Fuse, is read");
      how.strip_left = step["content"].string();
      how.strip_count = static_cast<uint32_t>(std::min<uint64_t>(step.count("start"), 1u << 30));
    } else if (type == "Metaspace") {
      const MetaspaceStep metaspace = read_metaspace(step);
      how.replacements.emplace_back(metaspace.replacement, " ");
      if (metaspace.prepend != MetaspaceStep::Prepend::kNever) how.drop_in_first.assign(1, ' ');
    } else {
      step.bad("a decoder of type \"{}\" is not read", printable(type));
    }
  }
  if (how.byte_level && (how.byte_fallback || !how.replacements.empty()))
    at.bad("ByteLevel beside other decoders is not read");
}

void read_post_processor(const At& at, TokenizerParts& parts) {
  std::vector<At> steps;
  flatten(at, "processors", steps);
  for (const At& step : steps) {
    const std::string type = step.type();
    if (type == "ByteLevel") continue;  // offsets only
    if (type != "TemplateProcessing")
      step.bad("a post-processor of type \"{}\" is not read", printable(type));
    bool behind = false;
    std::vector<TokenId> prefix, suffix;
    for (const At& piece : step["single"].items()) {
      if (piece.has("Sequence")) {
        if (behind) piece.bad("the text twice");
        behind = true;
        continue;
      }
      const std::string& name = piece["SpecialToken"]["id"].string();
      for (const At& id : step["special_tokens"][name.c_str()]["ids"].items())
        (behind ? suffix : prefix).push_back(id.id());
    }
    if (!behind) step["single"].bad("the text is missing");
    parts.prefix.insert(parts.prefix.begin(), prefix.begin(), prefix.end());
    parts.suffix.insert(parts.suffix.end(), suffix.begin(), suffix.end());
  }
}

void read_vocab(const At& at, TokenizerParts& parts, std::unordered_map<std::string_view, TokenId>& ids) {
  if (!at.value().is_object()) at.bad("expected an object, found {}", at.value().type_name());
  // Ids are dense but for a few holes; memory follows the highest one.
  const size_t limit = 2 * at.value().size() + 65536;
  ids.reserve(at.value().size());
  for (const auto& [token, value] : at.value().items()) {
    const TokenId id = At(value, at.where()).id();
    if (static_cast<size_t>(id) >= limit)
      at.bad("\"{}\" has id {}; expected one below {}", printable(token), id, limit);
    if (static_cast<size_t>(id) >= parts.tokens.size()) parts.tokens.resize(id + 1);
    if (parts.tokens[id])
      at.bad("\"{}\" and \"{}\" have the same id, {}", printable(*parts.tokens[id]), printable(token), id);
    parts.tokens[id] = token;
  }
  for (size_t id = 0; id < parts.tokens.size(); ++id)
    if (parts.tokens[id]) ids.emplace(*parts.tokens[id], static_cast<TokenId>(id));
}

void read_model(const At& at, TokenizerParts& parts) {
  // Files of old versions do not name the type of a BPE model.
  if (at.has("type") && at.type() != "BPE")
    at.bad("a model of type \"{}\" is not read", printable(at.type()));
  if (at.has("dropout") && at.value()["dropout"] != 0) at["dropout"].bad("dropout is not read");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (at.has(key) && !at[key].string().empty())
      at[key].bad("\"{}\" is not read", printable(at[key].string()));
  std::unordered_map<std::string_view, TokenId> ids;
  read_vocab(at["vocab"], parts, ids);
  const auto id_of = [&](std::string_view token) {
    const auto found = ids.find(token);
    return found == ids.end() ? std::nullopt : std::optional(found->second);
  };
  parts.bpe.ignore_merges = at.flag("ignore_merges", false);
  parts.bpe.byte_fallback = at.flag("byte_fallback", false);
  parts.bpe.fuse_unknown = at.flag("fuse_unk", false);
  if (at.has("unk_token")) {
    parts.bpe.unknown = id_of(at["unk_token"].string());
    if (!parts.bpe.unknown)
      at["unk_token"].bad("\"{}\" is not in the vocabulary", printable(at["unk_token"].string()));
  }
  const At merges = at["merges"];
  if (!merges.value().is_array()) merges.bad("expected an array, found {}", merges.value().type_name());
  parts.merges.reserve(merges.value().size());
  for (const Json& merge : merges.value()) {
    const auto index = static_cast<uint32_t>(parts.merges.size());
    std::string left, right;
    if (merge.is_string()) {
      const auto& both = merge.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      if (space == std::string::npos)
        merges.bad("merge {} is \"{}\"; expected two tokens", index, printable(both));
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get_ref<const std::string&>();
      right = merge[1].get_ref<const std::string&>();
    } else {
      merges.bad("merge {} is neither \"left right\" nor two strings", index);
    }
    const auto a = id_of(left), b = id_of(right), c = id_of(left + right);
    if (!a || !b || !c)
      merges.bad("merge {} names \"{}\", which is not in the vocabulary", index,
                 printable(!a   ? left
                           : !b ? right
                                : left + right));
    parts.merges.push_back({*a, *b, *c, index});
  }
}

void read_added(const At& at, TokenizerParts& parts) {
  for (const At& item : at.items()) {
    const bool special = item.flag("special", false);
    parts.added.push_back({.id = item["id"].id(),
                           .content = item["content"].string(),
                           .special = special,
                           .normalized = item.flag("normalized", !special),
                           .single_word = item.flag("single_word", false),
                           .lstrip = item.flag("lstrip", false),
                           .rstrip = item.flag("rstrip", false)});
  }
}

Tokenizer from_value(const Json& json, std::string_view name) {
  const At root(json, std::string(name) + ":");
  if (!json.is_object()) fail("{}: expected an object, found {}", name, json.type_name());
  TokenizerParts parts{.name = std::string(name)};
  const auto optional_part = [&](const char* key, auto read) {
    if (root.has(key)) read(root[key], parts);
  };
  read_model(root["model"], parts);
  optional_part("added_tokens", read_added);
  optional_part("normalizer", read_normalizer);
  optional_part("pre_tokenizer", read_pre_tokenizer);
  optional_part("post_processor", read_post_processor);
  if (root.has("decoder"))
    read_decoder(root["decoder"], parts);
  else
    parts.decoding.byte_level = parts.bpe.bytes;
  return Tokenizer(std::move(parts));
}

}  // namespace

Tokenizer Tokenizer::from_json(std::string_view characters, std::string_view name) {
  return from_value(parse_json(characters, name), name);
}

Tokenizer Tokenizer::from_file(const std::string& path) { return from_value(read_json(path), path); }

}  // namespace kt::inline texts
