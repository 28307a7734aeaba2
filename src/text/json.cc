#include "text/json.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "text/shown.h"

namespace kt::inline texts {
namespace {

// Builds the value while it counts: nlohmann's own builder keeps the last of duplicate keys and goes as deep
// as the text does.
template <typename Json>
class Builder final : public nlohmann::json_sax<Json> {
 public:
  using number_integer_t = typename Json::number_integer_t;
  using number_unsigned_t = typename Json::number_unsigned_t;
  using number_float_t = typename Json::number_float_t;
  using string_t = typename Json::string_t;
  using binary_t = typename Json::binary_t;

  Builder(Json& root, std::string_view name, JsonLimits limits) : name_(name), limits_(limits), root_(root) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(std::size_t) override { return enter(Json::object()); }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return enter(Json::array()); }
  bool end_array() override { return leave(); }

  bool key(string_t& value) override {
    auto& object = open_.back()->template get_ref<typename Json::object_t&>();
    if (object.size() >= limits_.keys) fail("{}: an object of more than {} keys", name_, limits_.keys);
    const auto [place, is_new] = object.emplace(value, nullptr);
    if (!is_new) fail("{}: duplicate key \"{}\"", name_, shown(value));
    slot_ = &place->second;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    json_syntax_error(position, error, name_);
  }

 private:
  template <typename Value>
  bool add(Value&& value) {
    place(std::forward<Value>(value));
    return true;
  }

  template <typename Value>
  Json& place(Value&& value) {
    if (++values_ > limits_.values) fail("{}: more than {} values", name_, limits_.values);
    if (open_.empty()) return root_ = std::forward<Value>(value);
    if (open_.back()->is_object()) return *slot_ = std::forward<Value>(value);
    return open_.back()->template get_ref<typename Json::array_t&>().emplace_back(std::forward<Value>(value));
  }

  bool enter(Json&& container) {
    if (static_cast<int>(open_.size()) >= limits_.depth)
      fail("{}: nested deeper than {} levels", name_, limits_.depth);
    open_.push_back(&place(std::move(container)));
    return true;
  }

  bool leave() {
    open_.pop_back();
    return true;
  }

  std::string_view name_;
  JsonLimits limits_;
  Json& root_;
  std::vector<Json*> open_;  // containers from the root to where we are; a container grows only at its end
  Json* slot_ = nullptr;     // of the key read last
  size_t values_ = 0;
};

template <typename Json>
void parse_into(nlohmann::json_sax<Json>& handler, std::string_view characters, std::string_view name) {
  // The lexer takes a zero byte for the end and would accept anything behind it.
  if (const size_t zero = characters.find('\0'); zero != characters.npos)
    fail("{}: not JSON at byte {}: a zero byte", name, zero);
  try {
    Json::sax_parse(characters.begin(), characters.end(), &handler);
  } catch (const nlohmann::detail::exception& error) {
    fail("{}: not JSON: {}", name, shown(error.what()));
  } catch (const std::bad_alloc&) {
    fail_as(ErrorKind::kMemory, "{}: no memory to parse {} bytes of JSON", name, characters.size());
  }
}

template <typename Json>
Json parse(std::string_view characters, std::string_view name, JsonLimits limits) {
  if (characters.size() > limits.bytes)
    fail("{}: {} bytes of JSON, at most {} are read", name, characters.size(), limits.bytes);
  Json out;
  Builder<Json> builder(out, name, limits);
  parse_into<Json>(builder, characters, name);
  return out;
}

}  // namespace

void json_syntax_error(size_t position, const nlohmann::detail::exception& error, std::string_view name) {
  // "[json.exception.parse_error.101] parse error at line 1, column 9: syntax error while ...: reason"
  std::string_view reason = error.what();
  if (const size_t at = reason.find("] "); at != reason.npos) reason.remove_prefix(at + 2);
  if (const size_t at = reason.find(": "); at != reason.npos) reason.remove_prefix(at + 2);
  fail("{}: not JSON at byte {}: {}", name, position, shown(reason));
}

void parse_json_into(nlohmann::json_sax<Json>& handler, std::string_view characters, std::string_view name) {
  parse_into<Json>(handler, characters, name);
}

Json parse_json(std::string_view characters, std::string_view name, JsonLimits limits) {
  return parse<Json>(characters, name, limits);
}

OrderedJson parse_ordered_json(std::string_view characters, std::string_view name, JsonLimits limits) {
  limits.keys = std::min(limits.keys, kOrderedKeys);
  return parse<OrderedJson>(characters, name, limits);
}

Json read_json(const std::string& path, JsonLimits limits) {
  const MappedFile file(path);
  return parse_json({reinterpret_cast<const char*>(file.bytes().data()), file.size()}, path, limits);
}

}  // namespace kt::inline texts
