#include "weights/safetensors.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <set>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "base/sha256.h"
#include "text/json.h"
#include "text/shown.h"

namespace kt::inline weights {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr size_t kMostHeader = 100'000'000;
constexpr size_t kAlign = 64;
constexpr size_t kMostDimensions = 64;
constexpr std::string_view kMetadataKey = "__metadata__";

static_assert(std::endian::native == std::endian::little, "numbers are read as they lie in the file");

// Bytes of a tensor, or Error naming the file and it.
size_t bytes_of(Dtype dtype, std::span<const int64_t> shape, std::string_view file, std::string_view tensor) {
  size_t bits = static_cast<size_t>(dtype_bits(dtype));
  for (const int64_t size : shape) {
    if (size < 0) fail("{}: {}: shape {} has a negative dimension", file, shown(tensor), shape_text(shape));
    if (__builtin_mul_overflow(bits, static_cast<size_t>(size), &bits))
      fail("{}: {}: {} {} overflows 64 bits", file, shown(tensor), name_of(dtype), shape_text(shape));
  }
  if (bits % 8 != 0)
    fail("{}: {}: {} {} does not fill whole bytes", file, shown(tensor), name_of(dtype), shape_text(shape));
  return bits / 8;
}

struct Entry {
  Tensor tensor;
  uint64_t begin = 0, end = 0;  // in the data behind the header
};

// Reads the header into entries as it is parsed: a tree of it would be many times its 100 MB.
class HeaderHandler final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderHandler(std::string_view file) : file_(file) {}

  std::vector<Entry> entries;
  Metadata metadata;

  bool null() override {
    if (where_ != Where::kTop || name_ != kMetadataKey) unexpected("null");
    if (std::exchange(has_metadata_, true)) duplicate(name_);
    return true;
  }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { unexpected(text("the number {}", value)); }
  bool number_float(number_float_t, const string_t& digits) override {
    unexpected(text("the number {}", shown(digits)));
  }
  bool binary(binary_t&) override { unexpected("bytes"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::kShape) {
      if (value > INT64_MAX) unexpected(text("the number {}", value));
      if (entries.back().tensor.shape.size() == kMostDimensions)
        fail("{}: {}: more than {} dimensions", file_, shown(name_), kMostDimensions);
      entries.back().tensor.shape.push_back(static_cast<int64_t>(value));
    } else if (where_ == Where::kOffsets && offsets_ < 2) {
      (offsets_ == 0 ? entries.back().begin : entries.back().end) = value;
      ++offsets_;
    } else {
      unexpected(text("the number {}", value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (where_ == Where::kMetadata) {
      if (!metadata.emplace(field_, std::move(value)).second) duplicate(field_);
      return true;
    }
    if (where_ != Where::kTensor || field_ != "dtype") unexpected("a string");
    const auto dtype = dtype_named(value);
    if (!dtype) fail("{}: {}: unknown dtype \"{}\"", file_, shown(name_), shown(value));
    entries.back().tensor.dtype = *dtype;
    seen_ |= kDtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (where_ == Where::kStart) {
      where_ = Where::kTop;
    } else if (where_ == Where::kTop && name_ == kMetadataKey) {
      if (std::exchange(has_metadata_, true)) duplicate(name_);
      where_ = Where::kMetadata;
    } else if (where_ == Where::kTop) {
      where_ = Where::kTensor;
      seen_ = 0;
      entries.emplace_back().tensor.name = name_;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kTensor && seen_ != kAll)
      fail("{}: {}: dtype, shape or data_offsets is missing", file_, shown(name_));
    where_ = Where::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (where_ != Where::kTensor || (field_ != "shape" && field_ != "data_offsets")) unexpected("an array");
    where_ = field_ == "shape" ? Where::kShape : Where::kOffsets;
    seen_ |= field_ == "shape" ? kShape : kOffsets;
    offsets_ = 0;
    return true;
  }

  bool end_array() override {
    if (where_ == Where::kOffsets && offsets_ != 2)
      fail("{}: {}: data_offsets holds {} numbers, expected 2", file_, shown(name_), offsets_);
    where_ = Where::kTensor;
    return true;
  }

  bool key(string_t& value) override {
    if (where_ == Where::kTop) {
      if (value.size() > kMostTensorName)
        fail("{}: a tensor's name of {} bytes, at most {} are read: \"{}\"", file_, value.size(),
             kMostTensorName, shown(value));
      name_ = std::move(value);
      return true;
    }
    field_ = std::move(value);
    if (where_ != Where::kTensor) return true;
    const int field = field_ == "dtype"          ? kDtype
                      : field_ == "shape"        ? kShape
                      : field_ == "data_offsets" ? kOffsets
                                                 : 0;
    if (field == 0) fail("{}: {}: unknown key \"{}\"", file_, shown(name_), shown(field_));
    if (seen_ & field) duplicate(text("{}: {}", name_, field_));
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    json_syntax_error(kLengthBytes + position, error, file_);
  }

 private:
  enum class Where { kStart, kTop, kMetadata, kTensor, kShape, kOffsets };
  enum { kDtype = 1, kShape = 2, kOffsets = 4, kAll = 7 };

  [[noreturn]] void unexpected(std::string_view what) const {
    const bool deep = where_ != Where::kStart && where_ != Where::kTop;
    fail("{}: the header has {} where it may not: \"{}\"{}{}", file_, what, shown(name_), deep ? ", " : "",
         deep ? shown(field_) : "");
  }
  [[noreturn]] void duplicate(std::string_view what) const {
    fail("{}: duplicate key \"{}\"", file_, shown(what));
  }

  std::string_view file_;
  Where where_ = Where::kStart;
  std::string name_, field_;  // the keys read last, at the top and in an entry
  int seen_ = 0, offsets_ = 0;
  bool has_metadata_ = false;
};

void refuse_duplicates(std::vector<Entry>& entries, std::string_view file) {
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.tensor.name < b.tensor.name; });
  for (size_t i = 1; i < entries.size(); ++i)
    if (entries[i - 1].tensor.name == entries[i].tensor.name)
      fail("{}: duplicate key \"{}\"", file, shown(entries[i].tensor.name));
}

void check_sizes(const std::vector<Entry>& entries, size_t available, std::string_view file) {
  for (const Entry& e : entries) {
    const std::string& name = e.tensor.name;
    if (e.begin > e.end || e.end > available)
      fail("{}: {}: data_offsets [{}, {}] are not within the {} bytes of data", file, shown(name), e.begin,
           e.end, available);
    const size_t expected = bytes_of(e.tensor.dtype, e.tensor.shape, file, name);
    if (expected != e.end - e.begin)
      fail("{}: {}: {} takes {} bytes, data_offsets [{}, {}] hold {}", file, shown(name), describe(e.tensor),
           expected, e.begin, e.end, e.end - e.begin);
  }
}

// Entries in the order of their bytes, which must follow each other without holes up to the end.
void check_cover(std::vector<Entry>& entries, size_t available, std::string_view file) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.tensor.name) < std::tie(b.begin, b.end, b.tensor.name);
  });
  uint64_t covered = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& e = entries[i];
    if (e.begin < covered)
      fail("{}: {} begins at byte {} of the data, inside {}, which ends at {}", file, shown(e.tensor.name),
           e.begin, shown(entries[i - 1].tensor.name), covered);
    if (e.begin > covered)
      fail("{}: a hole of {} bytes before {}, which begins at byte {} of the data", file, e.begin - covered,
           shown(e.tensor.name), e.begin);
    covered = e.end;
  }
  if (covered != available)
    fail("{}: tensors end at byte {} of the data, the file has {} bytes of data", file, covered, available);
}

std::string json_string(std::string_view characters, std::string_view what) {
  try {
    return Json(characters).dump();
  } catch (const nlohmann::detail::exception&) {
    fail("{} \"{}\" is not UTF-8", what, shown(characters));
  }
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view name) {
  if (file.size() < kLengthBytes)
    fail("{}: {} bytes, a safetensors file has at least {}", name, file.size(), kLengthBytes);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const size_t behind = file.size() - kLengthBytes;
  if (length > kMostHeader)
    fail("{}: the header claims {} bytes, at most {} are read", name, length, kMostHeader);
  if (length > behind)
    fail("{}: truncated: the header claims {} bytes, {} follow its length", name, length, behind);
  const auto* characters = reinterpret_cast<const char*>(file.data() + kLengthBytes);
  if (length == 0 || characters[0] != '{') fail("{}: the header does not start with '{{'", name);

  HeaderHandler handler(name);
  parse_json_into(handler, {characters, static_cast<size_t>(length)}, name);
  std::vector<Entry>& entries = handler.entries;
  const std::span<const std::byte> data = file.subspan(kLengthBytes + length);
  refuse_duplicates(entries, name);
  check_sizes(entries, data.size(), name);
  check_cover(entries, data.size(), name);

  SafetensorsHeader out;
  out.metadata = std::move(handler.metadata);
  out.tensors.reserve(entries.size());
  for (Entry& e : entries) {
    e.tensor.bytes = data.subspan(e.begin, e.end - e.begin);
    out.tensors.push_back(std::move(e.tensor));
  }
  return out;
}

size_t byte_count(const TensorSpec& spec) {
  if (spec.dtype == Dtype::kGguf)
    fail_as(ErrorKind::kInternal, "{}: GGUF blocks have no safetensors dtype", shown(spec.name));
  return bytes_of(spec.dtype, spec.shape, "safetensors", spec.name);
}

std::string safetensors_header(const std::vector<TensorSpec>& tensors, const Metadata& metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (json.back() != '{') json += ',';
      json += json_string(key, "metadata key") + ":" + json_string(value, "metadata value");
    }
    json += '}';
  }
  std::set<std::string_view> names;
  uint64_t at = 0;
  for (const TensorSpec& t : tensors) {
    if (t.name == kMetadataKey || !names.insert(t.name).second)
      fail("a safetensors file cannot hold two tensors, or metadata and a tensor, of one name: {}",
           shown(t.name));
    const uint64_t end = checked_add(at, byte_count(t), t.name);
    if (json.size() > 1) json += ',';
    json += json_string(t.name, "tensor name") + ":{\"dtype\":\"" + std::string(name_of(t.dtype)) +
            "\",\"shape\":[";
    for (size_t i = 0; i < t.shape.size(); ++i) json += text_of(i == 0 ? "{}" : ",{}", t.shape[i]);
    json += text("],\"data_offsets\":[{},{}]}}", at, end);
    at = end;
  }
  json += '}';
  json.resize(round_up(kLengthBytes + json.size(), kAlign) - kLengthBytes, ' ');
  if (json.size() > kMostHeader)
    fail("a header of {} bytes for {} tensors, at most {} are read", json.size(), tensors.size(),
         kMostHeader);
  const uint64_t length = json.size();
  std::string out(kLengthBytes, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + json;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors,
                                     const Metadata& metadata)
    : tensors_(std::move(tensors)), file_(std::move(path)) {
  const std::string header = safetensors_header(tensors_, metadata);
  size_ = header.size();
  starts_.reserve(tensors_.size());
  for (const TensorSpec& t : tensors_) {
    starts_.push_back(size_);
    size_ = checked_add(size_, byte_count(t), file_.path());
  }
  file_.reserve(size_);
  file_.write_at(0, std::as_bytes(std::span(header)));
  written_ = header.size();
}

void SafetensorsWriter::write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) {
  KT_CHECK(tensor < tensors_.size(), "{}: tensor {} of {}", file_.path(), tensor, tensors_.size());
  const size_t size = byte_count(tensors_[tensor]);
  KT_CHECK(offset <= size && bytes.size() <= size - offset, "{}: {}: {} bytes at {} of {}", file_.path(),
           tensors_[tensor].name, bytes.size(), offset, size);
  file_.write_at(starts_[tensor] + offset, bytes);
  std::atomic_ref(written_).fetch_add(bytes.size(), std::memory_order_relaxed);
}

std::string SafetensorsWriter::digest() {
  constexpr size_t kChunk = size_t{1} << 20;
  std::vector<std::byte> chunk(std::min<uint64_t>(kChunk, size_));
  Sha256 sha;
  for (uint64_t at = 0; at < size_;) {
    const auto part = std::span(chunk).first(std::min<uint64_t>(kChunk, size_ - at));
    file_.read_at(at, part);
    sha.add(part);
    at += part.size();
  }
  return sha.hex();
}

void SafetensorsWriter::commit() {
  KT_CHECK(written_ == size_, "{}: {} of {} bytes were written", file_.path(), written_, size_);
  file_.commit();
}

}  // namespace kt::inline weights
