#include "text/yaml.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "text/shown.h"
#include "text/yaml_plain.h"
#include "text/yaml_text.h"

namespace kt::inline texts {
namespace {

// Descends through the text once. Every function that reads a node begins at its first character; those of
// block style end at the next content of a later line, those of flow style right behind the node.
class YamlBuilder {
 public:
  YamlBuilder(YamlText& text, YamlLimits limits, YamlLines* lines)
      : text_(text), limits_(limits), lines_(lines) {}

  Json document() {
    text_.next_content();
    if (lines_) lines_->line = line_at(text_.here());
    if (text_.peek() == '%' && text_.column() == 0)
      text_.fail_expecting("the document: directives are not read");
    Json out;
    if (text_.at_document_marker() && text_.peek() == '-') {
      text_.advance(3);
      out = block_node(-1, After::kKey);
    } else if (!text_.at_end() && !text_.at_document_marker()) {
      out = node_here(-1, Collections::kAllowed);
    }
    if (text_.at_document_marker() && text_.peek() == '.') {
      text_.advance(3);
      text_.end_line();
      text_.next_content();
    }
    if (text_.at_document_marker() && text_.peek() == '-')
      text_.fail_expecting("the end of the file: only one document is read");
    if (!text_.at_end()) text_.fail_expecting("the end of the document");
    return out;
  }

 private:
  enum class After { kDash, kKey };
  enum class Collections { kAllowed, kRefused };  // block ones: only where a line begins, or behind "- "

  struct Scalar {
    std::string characters = {};
    size_t place = 0;
    bool quoted = false;
  };

  // One level of nesting while it lives.
  class Level {
   public:
    explicit Level(YamlBuilder& builder) : depth_(builder.depth_) {
      if (++depth_ <= builder.limits_.depth) return;
      builder.text_.fail_at(builder.text_.here(),
                            "found a collection inside {} others, expected at most {} levels", depth_ - 1,
                            builder.limits_.depth);
    }
    ~Level() { --depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    int& depth_;
  };

  // The lines of one part of a collection while it is read. Until it ends, those beside it do not move.
  class Part {
   public:
    Part(YamlBuilder& builder, size_t place, const std::string& key = {})
        : builder_(builder), whole_(builder.lines_) {
      if (!whole_) return;
      whole_->parts.push_back({.line = builder.line_at(place), .key = key});
      builder.lines_ = &whole_->parts.back();
    }
    ~Part() { builder_.lines_ = whole_; }
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

   private:
    YamlBuilder& builder_;
    YamlLines* const whole_;
  };

  // Of a place behind the last one asked for: a text is counted once.
  int line_at(size_t place) {
    line_ += text_.line_breaks(counted_, place);
    counted_ = place;
    return line_;
  }

  void count_value(size_t place) {
    if (++values_ > limits_.values)
      text_.fail_at(place, "found value number {}, expected at most {}", values_, limits_.values);
  }

  Json null_value() {
    count_value(text_.here());
    return {};
  }

  Json value_of(Scalar scalar) {
    count_value(scalar.place);
    if (scalar.quoted) return std::move(scalar.characters);
    PlainScalar plain = read_plain(scalar.characters);
    if (!plain.refused.empty()) text_.fail_at(scalar.place, "{}", plain.refused);
    return std::move(plain.value);
  }

  // What begins a node and is never read.
  void refuse_unread() {
    const char c = text_.peek();
    if (c == '&' || c == '*') text_.fail_expecting("a value: anchors and aliases are not read");
    if (c == '!') text_.fail_expecting("a value: tags are not read");
    if (c == '%' || c == '@' || c == '`')
      text_.fail_expecting("a value, which this character cannot begin; quote it");
    if (text_.at_indicator('?')) text_.fail_expecting("a key that is one scalar: complex keys are not read");
  }

  bool at_quote() const { return text_.peek() == '"' || text_.peek() == '\''; }
  bool at_bracket() const { return text_.peek() == '[' || text_.peek() == '{'; }

  // The scalar here, of one line unless it is quoted.
  Scalar scalar_line(YamlStyle style) {
    Scalar out{.place = text_.here(), .quoted = at_quote()};
    out.characters = out.quoted ? text_.quoted() : text_.plain_line(style);
    return out;
  }

  // At the ':' of this key.
  void check_one_line(const Scalar& key) const {
    if (text_.has_line_break_since(key.place))
      text_.fail_at(key.place, "found a key of several lines, expected the key and its \":\" in one line");
  }

  Json& slot_for(Json& mapping, const Scalar& key) {
    if (key.characters == "<<" && !key.quoted)
      text_.fail_at(key.place, "found \"<<\", expected a key: merge keys are not read");
    auto [place, is_new] = mapping.get_ref<Json::object_t&>().try_emplace(key.characters);
    if (!is_new)
      text_.fail_at(key.place, "found the key \"{}\" a second time, expected each key once",
                    shown(key.characters));
    return place->second;
  }

  // Block style.

  // What follows "-", "key:" or "---" at column `parent`, on the same line or below; null if nothing does.
  Json block_node(int parent, After after) {
    const bool tab = text_.skip_blanks();
    if (!text_.at_comment() && !text_.at_end() && text_.peek() != '\n')
      return node_here(parent, after == After::kDash && !tab ? Collections::kAllowed : Collections::kRefused);
    text_.end_line();
    text_.next_content();
    if (text_.at_end() || text_.at_document_marker()) return null_value();
    const int column = text_.column();
    // A sequence may stand right under its key.
    if (after == After::kKey && column == parent && text_.at_indicator('-'))
      return block_sequence(column, parent);
    return column > parent ? node_here(parent, Collections::kAllowed) : null_value();
  }

  Json node_here(int parent, Collections collections) {
    refuse_unread();
    if (text_.peek() == '|' || text_.peek() == '>') {
      Scalar scalar{.place = text_.here(), .quoted = true};
      scalar.characters = text_.block_scalar(parent);
      text_.next_content();
      return value_of(std::move(scalar));
    }
    if (text_.at_indicator('-')) {
      if (collections == Collections::kRefused) text_.fail_expecting("the sequence on a line of its own");
      return block_sequence(text_.column(), parent);
    }
    Json out;
    if (at_bracket()) {
      out = flow_collection();
      text_.skip_blanks();
      if (text_.at_indicator(':'))
        text_.fail_expecting("no \":\" behind a collection: complex keys are not read");
    } else {
      const int column = collections == Collections::kAllowed ? text_.column() : 0;
      Scalar scalar = scalar_line(YamlStyle::kBlock);
      text_.skip_blanks();
      if (text_.at_indicator(':')) {
        check_one_line(scalar);
        if (collections == Collections::kRefused)
          text_.fail_expecting(
              "one value in this line; a mapping starts on its own line, and text is quoted");
        return block_mapping(std::move(scalar), column);
      }
      if (!scalar.quoted)
        scalar.characters = text_.plain_lines(std::move(scalar.characters), YamlStyle::kBlock, parent);
      out = value_of(std::move(scalar));
    }
    text_.end_line();
    text_.next_content();
    return out;
  }

  // Whether the collection at this column goes on here.
  bool goes_on(int column) const {
    if (text_.at_end() || text_.at_document_marker() || text_.column() < column) return false;
    if (text_.column() > column)
      text_.fail_expecting(kt::text("column {} or less, as the lines above are indented", column + 1));
    return true;
  }

  Json block_sequence(int column, int parent) {
    const Level level(*this);
    count_value(text_.here());
    Json out = Json::array();
    do {
      const Part part(*this, text_.here());
      text_.advance();
      out.push_back(block_node(column, After::kDash));
    } while (goes_on(column) && text_.at_indicator('-'));
    if (column > parent && goes_on(column)) text_.fail_expecting("\"- \" of the next entry");
    return out;
  }

  Json block_mapping(Scalar key, int column) {
    const Level level(*this);
    count_value(key.place);
    Json out = Json::object();
    for (;;) {
      Json& slot = slot_for(out, key);
      {
        const Part part(*this, key.place, key.characters);
        text_.advance();
        slot = block_node(column, After::kKey);
      }
      if (!goes_on(column)) return out;
      key = block_key();
    }
  }

  // The key here; afterwards at its ':'.
  Scalar block_key() {
    refuse_unread();
    if (at_bracket() || text_.at_indicator('-')) text_.fail_expecting("a key, as in the lines above");
    Scalar key = scalar_line(YamlStyle::kBlock);
    text_.skip_blanks();
    if (!text_.at_indicator(':')) text_.fail_expecting("\": \" behind a key");
    check_one_line(key);
    return key;
  }

  // Flow style.

  Json flow_collection() { return text_.peek() == '[' ? flow_sequence() : flow_mapping(); }

  Scalar flow_scalar() {
    Scalar out = scalar_line(YamlStyle::kFlow);
    if (!out.quoted) out.characters = text_.plain_lines(std::move(out.characters), YamlStyle::kFlow, -1);
    text_.next_in_flow();
    return out;
  }

  // Whether the ':' of this key stands here. Behind quotes any ':' is, as in JSON; without quotes a ':' that
  // is part of the text was read with it.
  bool at_flow_colon(const Scalar& key) const {
    if (text_.peek() != ':') return false;
    check_one_line(key);
    return true;
  }

  Json flow_node() {
    refuse_unread();
    return at_bracket() ? flow_collection() : value_of(flow_scalar());
  }

  // Behind the ':' of a key.
  Json flow_value() {
    text_.next_in_flow();
    const char c = text_.peek();
    return c == ',' || c == ']' || c == '}' ? null_value() : flow_node();
  }

  // Over a comma, or at the closing bracket.
  void separate(char closing) {
    text_.next_in_flow();
    if (text_.peek() == ',')
      text_.advance();
    else if (text_.peek() != closing)
      text_.fail_expecting(kt::text("\",\" or \"{}\"", closing));
  }

  Json flow_sequence() {
    const Level level(*this);
    count_value(text_.here());
    Json out = Json::array();
    text_.advance();
    for (text_.next_in_flow(); text_.peek() != ']'; text_.next_in_flow()) {
      {
        const Part part(*this, text_.here());
        out.push_back(flow_entry());
      }
      separate(']');
    }
    text_.advance();
    return out;
  }

  // An entry of a sequence; [a: 1] is a mapping of one key.
  Json flow_entry() {
    refuse_unread();
    if (at_bracket()) return flow_collection();
    Scalar scalar = flow_scalar();
    if (!at_flow_colon(scalar)) return value_of(std::move(scalar));
    const Level level(*this);
    count_value(scalar.place);
    Json out = Json::object();
    Json& slot = slot_for(out, scalar);
    const Part part(*this, scalar.place, scalar.characters);
    text_.advance();
    slot = flow_value();
    return out;
  }

  Json flow_mapping() {
    const Level level(*this);
    count_value(text_.here());
    Json out = Json::object();
    text_.advance();
    for (text_.next_in_flow(); text_.peek() != '}'; text_.next_in_flow()) {
      refuse_unread();
      if (at_bracket()) text_.fail_expecting("a key that is one scalar: complex keys are not read");
      Scalar key = flow_scalar();
      const bool has_value = at_flow_colon(key);
      Json& slot = slot_for(out, key);
      {
        const Part part(*this, key.place, key.characters);
        if (has_value) text_.advance();
        slot = has_value ? flow_value() : null_value();
      }
      separate('}');
    }
    text_.advance();
    return out;
  }

  YamlText& text_;
  YamlLimits limits_;
  int depth_ = 0;
  size_t values_ = 0;
  YamlLines* lines_;  // of the value that is read; null: nobody asks
  size_t counted_ = 0;
  int line_ = 1;
};

}  // namespace

const YamlLines& YamlLines::of(std::string_view name) const {
  const auto found = std::ranges::find(parts, name, &YamlLines::key);
  return found == parts.end() ? *this : *found;
}

Json parse_yaml(std::string_view characters, std::string_view name, YamlLimits limits, YamlLines* lines) {
  if (characters.size() > limits.bytes)
    fail("{}:1:1: found {} bytes of YAML, expected at most {}", name, characters.size(), limits.bytes);
  try {
    YamlText text(characters, name);
    return YamlBuilder(text, limits, lines).document();
  } catch (const std::bad_alloc&) {
    fail_as(ErrorKind::kMemory, "{}: no memory to parse {} bytes of YAML", name, characters.size());
  }
}

Json read_yaml(const std::string& path, YamlLimits limits, YamlLines* lines) {
  const MappedFile file(path);
  return parse_yaml({reinterpret_cast<const char*>(file.bytes().data()), file.size()}, path, limits, lines);
}

}  // namespace kt::inline texts
