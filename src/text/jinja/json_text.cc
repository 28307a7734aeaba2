// Values as JSON text, byte for byte as Python's json.dumps writes them.
#include <algorithm>
#include <cmath>

#include "text/jinja/characters.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

namespace {

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Meter& meter) : style_(style), meter_(meter) {}

  void write(const Value& v, int depth) {
    const Meter::Level level(meter_);
    meter_.step();
    switch (v.kind()) {
      case Kind::kNone:
        out += "null";
        return;
      case Kind::kBool:
        out += v.boolean() ? "true" : "false";
        return;
      case Kind::kInt:
        out += std::to_string(v.integer());
        return;
      case Kind::kFloat:
        out += float_text(v.number());
        return;
      case Kind::kString:
        string(v.string());
        return;
      case Kind::kDict:
        object(v.dict(), depth);
        return;
      case Kind::kSequence:
        if (v.sequence().kind == SequenceKind::kList || v.sequence().kind == SequenceKind::kTuple) {
          return array(v.sequence().items, depth);
        }
        break;
      default:
        break;
    }
    meter_.fail("Object of type {} is not JSON serializable", type_name(v));
  }

  std::string out;

 private:
  static std::string float_text(double v) {
    if (std::isnan(v)) return "NaN";
    if (std::isinf(v)) return v < 0 ? "-Infinity" : "Infinity";
    return float_digits(v);
  }

  void line(int depth) {
    meter_.work(style_.between_items.size() + style_.after_key.size());
    meter_.fits(out.size());
    if (!style_.indent) return;
    meter_.work(style_.indent->size() * static_cast<size_t>(depth));
    out += '\n';
    for (int i = 0; i < depth; ++i) out += *style_.indent;
  }

  void hex(uint32_t unit) {
    static constexpr char kHex[] = "0123456789abcdef";
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out += kHex[unit >> shift & 15];
  }

  void string(const std::string& s) {
    meter_.work(s.size());
    out += '"';
    for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) {
      const uint32_t p = code_point(s, at);
      static constexpr std::string_view kPlain = "\"\\\n\r\t\f\b", kLetters = "\"\\nrtfb";
      const size_t known = p < 0x80 ? kPlain.find(static_cast<char>(p)) : std::string_view::npos;
      if (known != std::string_view::npos) {
        out += '\\';
        out += kLetters[known];
      } else if (p < 32 || (style_.ascii && p > 0x7F && p < 0x10000)) {
        hex(p);
      } else if (style_.ascii && p >= 0x10000) {
        hex(0xD800 + ((p - 0x10000) >> 10));
        hex(0xDC00 + ((p - 0x10000) & 0x3FF));
      } else {
        append_code_point(out, p);
      }
    }
    out += '"';
  }

  void array(const std::vector<Value>& items, int depth) {
    if (items.empty()) {
      out += "[]";
      return;
    }
    out += '[';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i) out += style_.between_items;
      line(depth + 1);
      write(items[i], depth + 1);
    }
    line(depth);
    out += ']';
  }

  std::string key_text(const Value& key) {
    switch (key.kind()) {
      case Kind::kString:
        return key.string();
      case Kind::kNone:
        return "null";
      case Kind::kBool:
        return key.boolean() ? "true" : "false";
      case Kind::kInt:
        return std::to_string(key.integer());
      case Kind::kFloat:
        return float_text(key.number());
      default:
        meter_.fail("keys must be str, int, float, bool or None, not {}", type_name(key));
    }
  }

  void object(const Dict& dict, int depth) {
    if (dict.items.empty()) {
      out += "{}";
      return;
    }
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    if (style_.sort_keys) {
      std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) {
        return compare("<", a->first, b->first, meter_);
      });
    }
    out += '{';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i) out += style_.between_items;
      line(depth + 1);
      string(key_text(items[i]->first));
      out += style_.after_key;
      write(items[i]->second, depth + 1);
    }
    line(depth);
    out += '}';
  }

  const JsonStyle& style_;
  Meter& meter_;
};

}  // namespace

std::string json_text(const Value& v, const JsonStyle& style, Meter& meter) {
  JsonWriter writer(style, meter);
  writer.write(v, 0);
  meter.value(writer.out.size());
  return std::move(writer.out);
}

}  // namespace kt::inline texts::jinja
