#include "weights/gguf/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>

#include "base/checked.h"
#include "base/error.h"
#include "base/utf8.h"
#include "text/shown.h"

namespace kt::inline weights {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are read as they lie in the file");

constexpr uint32_t kMostDimensions = 4;
constexpr uint64_t kMostKey = 65535;  // bytes
constexpr uint64_t kDefaultAlignment = 32;
// Least bytes of an entry: lengths, numbers and types without a single character.
constexpr uint64_t kLeastPair = 8 + 4 + 1, kLeastTensor = 8 + 4 + 4 + 8;

enum ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};

// Bytes of a number; 0 for strings, arrays and unknown types.
size_t value_bytes(uint32_t type) {
  constexpr uint8_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < std::size(kBytes) ? kBytes[type] : 0;
}

struct TypeRow {
  uint32_t number;
  std::string_view name;
  int size, bytes;  // columns and bytes of a block
};
// Every type that files are known to hold, also those formats/ does not decode. Q8_1 and Q8_K are for
// activations; tools disagree about the bytes of Q8_1, so it is not here.
constexpr auto kTypes = std::to_array<TypeRow>({
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},     {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},      {8, "Q8_0", 32, 34},     {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},  {14, "Q6_K", 256, 210},
    {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74}, {18, "IQ3_XXS", 256, 98},
    {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110}, {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},       {26, "I32", 1, 4},
    {27, "I64", 1, 8},        {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},  {30, "BF16", 1, 2},
    {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},   {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
});

// Types that only one other program writes and reads; what a block of them takes is not known here.
struct ForeignType {
  uint32_t number;
  std::string_view name;
};
constexpr std::string_view kForeignProgram = "ik_llama.cpp";
constexpr auto kForeignTypes = std::to_array<ForeignType>({
    {97, "Q8_0_X4"},     {98, "Q8_1_X4"},    {99, "Q8_2_X4"},     {133, "Q6_0"},     {134, "IQ1_BN"},
    {135, "IQ2_BN"},     {136, "Q8_K64"},    {137, "IQ2_K"},      {138, "IQ3_K"},    {139, "IQ4_K"},
    {140, "IQ5_K"},      {141, "IQ6_K"},     {144, "IQ4_KS"},     {145, "IQ2_KS"},   {146, "IQ4_KSS"},
    {147, "Q8_K16"},     {148, "Q8_K32"},    {149, "Q8_KR8"},     {150, "Q8_K128"},  {151, "Q8_KV"},
    {152, "IQ5_KS"},     {153, "IQ2_KT"},    {154, "IQ3_KT"},     {155, "IQ4_KT"},   {156, "IQ3_KS"},
    {157, "IQ2_KL"},     {158, "IQ1_KT"},    {202, "Q4_0_R8"},    {206, "Q5_0_R4"},  {208, "Q8_0_R8"},
    {210, "Q2_K_R4"},    {211, "Q3_K_R4"},   {212, "Q4_K_R4"},    {213, "Q5_K_R4"},  {214, "Q6_K_R4"},
    {216, "IQ2_XXS_R4"}, {217, "IQ2_XS_R4"}, {218, "IQ3_XXS_R4"}, {219, "IQ1_S_R4"}, {220, "IQ4_NL_R4"},
    {221, "IQ3_S_R4"},   {222, "IQ2_S_R4"},  {223, "IQ4_XS_R8"},  {229, "IQ1_M_R4"}, {230, "BF16_R16"},
    {233, "Q6_0_R4"},    {335, "IQ2_BN_R4"}, {337, "IQ2_K_R4"},   {338, "IQ3_K_R4"}, {339, "IQ4_K_R4"},
    {340, "IQ5_K_R4"},   {344, "IQ4_KS_R4"}, {352, "IQ5_KS_R4"},  {353, "MXFP4_R8"}, {397, "Q8_K_R16"},
    {398, "Q8_KV_R8"},   {399, "Q8_K_R8"},
});

const ForeignType* foreign_type(uint32_t number) {
  const auto found = std::ranges::find(kForeignTypes, number, &ForeignType::number);
  return found == kForeignTypes.end() ? nullptr : &*found;
}

const TypeRow* type_row(uint32_t number) {
  for (const TypeRow& row : kTypes)
    if (row.number == number) return &row;
  return nullptr;
}

// Takes numbers and strings off the front of the file; running out is an Error that says of what.
class Cursor {
 public:
  Cursor(std::span<const std::byte> file, std::string_view name) : file_(file), name_(name) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return file_.size() - at_; }

  std::span<const std::byte> take(uint64_t count, std::string_view what) {
    if (count > left())
      fail("{}: truncated: {} takes {} bytes at byte {}, {} are left", name_, shown(what), count, at_,
           left());
    const auto out = file_.subspan(at_, count);
    at_ += count;
    return out;
  }

  template <typename T>
  T number(std::string_view what) {
    T out;
    std::memcpy(&out, take(sizeof out, what).data(), sizeof out);
    return out;
  }

  std::string_view string(std::string_view what, uint64_t most = UINT64_MAX) {
    const auto length = number<uint64_t>(what);
    if (length > most)
      fail("{}: {} of {} characters at byte {}, at most {} are read", name_, shown(what), length, at_, most);
    const auto bytes = take(length, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

 private:
  std::span<const std::byte> file_;
  std::string_view name_;
  uint64_t at_ = 0;
};

GgufArray read_array(Cursor& cursor, std::string_view file, std::string_view key) {
  GgufArray out;
  out.element_type = cursor.number<uint32_t>(key);
  out.count = cursor.number<uint64_t>(key);
  if (const size_t size = value_bytes(out.element_type); size > 0) {
    // Divided, because the product may not fit.
    if (out.count > cursor.left() / size)
      fail("{}: {}: an array of {} elements of {} bytes, {} bytes are left", file, shown(key), out.count,
           size, cursor.left());
    out.bytes = cursor.take(out.count * size, key);
    return out;
  }
  if (out.element_type != kString)
    fail("{}: {}: an array of {} {}, which no model has", file, shown(key),
         out.element_type == kArray ? "arrays, type" : "unknown type", out.element_type);
  if (out.count > cursor.left() / sizeof(uint64_t))
    fail("{}: {}: an array of {} strings, {} bytes are left", file, shown(key), out.count, cursor.left());
  Cursor walk = cursor;
  for (uint64_t i = 0; i < out.count; ++i) walk.string(key);
  out.bytes = cursor.take(walk.at() - cursor.at(), key);
  return out;
}

GgufValue read_value(Cursor& cursor, uint32_t type, std::string_view file, std::string_view key) {
  switch (type) {
    case kU8:
      return uint64_t{cursor.number<uint8_t>(key)};
    case kI8:
      return int64_t{cursor.number<int8_t>(key)};
    case kU16:
      return uint64_t{cursor.number<uint16_t>(key)};
    case kI16:
      return int64_t{cursor.number<int16_t>(key)};
    case kU32:
      return uint64_t{cursor.number<uint32_t>(key)};
    case kI32:
      return int64_t{cursor.number<int32_t>(key)};
    case kF32:
      return double{cursor.number<float>(key)};
    case kBool: {
      const auto value = cursor.number<uint8_t>(key);
      if (value > 1) fail("{}: {}: the boolean {}", file, shown(key), value);
      return value == 1;
    }
    case kString:
      return cursor.string(key);
    case kArray:
      return read_array(cursor, file, key);
    case kU64:
      return cursor.number<uint64_t>(key);
    case kI64:
      return cursor.number<int64_t>(key);
    case kF64:
      return cursor.number<double>(key);
    default:
      fail("{}: {}: unknown value type {}", file, shown(key), type);
  }
}

struct Entry {
  Tensor tensor;
  uint64_t offset = 0, size = 0;  // in the data behind the header
};

// Bytes of the tensor; its dimensions are already known to be no more than INT64_MAX each.
uint64_t size_of(const Tensor& tensor, std::string_view file) {
  const TypeRow* const row = type_row(tensor.gguf_type);
  if (const ForeignType* const foreign = foreign_type(tensor.gguf_type))
    fail_as(ErrorKind::kUnsupported, "{}: {}: {} ({}) is a type of {}, which no other program reads", file,
            shown(tensor.name), foreign->name, foreign->number, kForeignProgram);
  if (row == nullptr)
    fail("{}: {}: unknown tensor type {}, so that its size is unknown", file, shown(tensor.name),
         tensor.gguf_type);
  const int64_t columns = tensor.shape.empty() ? 1 : tensor.shape.back();
  if (columns % row->size != 0)
    fail("{}: {}: rows of {} columns are not whole blocks of {} columns of {}", file, shown(tensor.name),
         columns, row->size, row->name);
  int64_t elements = 1;
  for (const int64_t size : tensor.shape)
    if (__builtin_mul_overflow(elements, size, &elements))
      fail("{}: {}: shape {} overflows 63 bits", file, shown(tensor.name), shape_text(tensor.shape));
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(elements / row->size), static_cast<uint64_t>(row->bytes),
                             &bytes))
    fail("{}: {}: {} overflows 64 bits", file, shown(tensor.name), describe(tensor));
  return bytes;
}

Entry read_entry(Cursor& cursor, std::string_view file, uint64_t alignment) {
  Entry out;
  Tensor& tensor = out.tensor;
  tensor.dtype = Dtype::kGguf;
  tensor.name = cursor.string("a tensor's name", kMostTensorName);
  if (!is_valid_utf8(tensor.name))
    fail("{}: the name of a tensor is not UTF-8: \"{}\"", file, shown(tensor.name));
  const auto dimensions = cursor.number<uint32_t>(tensor.name);
  if (dimensions > kMostDimensions)
    fail("{}: {}: {} dimensions, at most {} are read", file, shown(tensor.name), dimensions, kMostDimensions);
  for (uint32_t i = 0; i < dimensions; ++i) {
    const auto size = cursor.number<uint64_t>(tensor.name);
    if (size > INT64_MAX) fail("{}: {}: a dimension of {}", file, shown(tensor.name), size);
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(size));
  }
  tensor.gguf_type = cursor.number<uint32_t>(tensor.name);
  out.offset = cursor.number<uint64_t>(tensor.name);
  if (out.offset % alignment != 0)
    fail("{}: {}: offset {} is not a multiple of the alignment {}", file, shown(tensor.name), out.offset,
         alignment);
  out.size = size_of(tensor, file);
  return out;
}

void refuse_duplicates(const std::vector<Entry>& entries, std::string_view file) {
  std::vector<std::string_view> names;
  for (const Entry& e : entries) names.push_back(e.tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) fail("{}: two tensors of the name {}", file, shown(*twice));
}

void refuse_overlaps(const std::vector<Entry>& entries, std::string_view file) {
  std::vector<const Entry*> order;
  for (const Entry& e : entries)
    if (e.size > 0) order.push_back(&e);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const Entry &a = *order[i - 1], &b = *order[i];
    if (b.offset < a.offset + a.size)
      fail("{}: {} begins at byte {} of the data, inside {}, which ends at {}", file, shown(b.tensor.name),
           b.offset, shown(a.tensor.name), a.offset + a.size);
  }
}

uint64_t alignment_of(const GgufHeader& header, std::string_view file) {
  const auto found = header.metadata.find("general.alignment");
  if (found == header.metadata.end()) return kDefaultAlignment;
  const auto* const value = std::get_if<uint64_t>(&found->second);
  if (value == nullptr) fail("{}: general.alignment is not an unsigned number", file);
  if (!std::has_single_bit(*value)) fail("{}: general.alignment is {}, not a power of two", file, *value);
  return *value;
}

void read_start(Cursor& cursor, GgufHeader& out, std::string_view name) {
  const auto magic = cursor.take(4, "the magic");
  if (std::memcmp(magic.data(), "GGUF", 4) != 0)
    fail("{}: not a GGUF file: it does not start with the characters GGUF", name);
  out.version = cursor.number<uint32_t>("the version");
  if ((out.version & 0xffff) == 0 && out.version != 0)
    fail("{}: a big-endian GGUF file (version {}); only little-endian ones are read", name,
         __builtin_bswap32(out.version));
  if (out.version < 2 || out.version > 3)
    fail("{}: GGUF version {}, versions 2 and 3 are read", name, out.version);
}

}  // namespace

bool GgufArray::is_strings() const { return element_type == kString; }

std::optional<int64_t> GgufArray::whole(uint64_t i) const {
  const size_t size = value_bytes(element_type);
  if (size == 0 || element_type == kF32 || element_type == kF64 || element_type == kBool) return std::nullopt;
  Cursor cursor(bytes.subspan(i * size, size), "GGUF array");
  const GgufValue value = read_value(cursor, element_type, "GGUF array", "an element");
  if (const auto* const number = std::get_if<int64_t>(&value)) return *number;
  const uint64_t number = std::get<uint64_t>(value);
  if (number > INT64_MAX) return std::nullopt;
  return static_cast<int64_t>(number);
}

std::optional<bool> GgufArray::flag(uint64_t i) const {
  const std::optional<int64_t> number =
      element_type == kBool ? std::optional<int64_t>(std::to_integer<int64_t>(bytes[i])) : whole(i);
  if (!number || *number < 0 || *number > 1) return std::nullopt;
  return *number == 1;
}

std::vector<std::string_view> GgufArray::strings() const {
  if (!is_strings()) fail("GGUF array of type {}, expected strings", element_type);
  std::vector<std::string_view> out;
  out.reserve(count);
  Cursor cursor(bytes, "GGUF array");
  for (uint64_t i = 0; i < count; ++i) out.push_back(cursor.string("a string"));
  return out;
}

GgufHeader parse_gguf(std::span<const std::byte> file, std::string_view name) {
  GgufHeader out;
  out.name = name;
  Cursor cursor(file, name);
  read_start(cursor, out, name);
  const auto tensors = cursor.number<uint64_t>("the number of tensors");
  const auto pairs = cursor.number<uint64_t>("the number of metadata keys");
  if (pairs > cursor.left() / kLeastPair || tensors > cursor.left() / kLeastTensor)
    fail("{}: {} metadata keys and {} tensors cannot be in the {} bytes left", name, pairs, tensors,
         cursor.left());
  for (uint64_t i = 0; i < pairs; ++i) {
    const std::string_view key = cursor.string("a metadata key", kMostKey);
    if (key.empty()) fail("{}: metadata key {} is empty", name, i);
    if (!is_valid_utf8(key)) fail("{}: metadata key {} is not UTF-8: \"{}\"", name, i, shown(key));
    const auto type = cursor.number<uint32_t>(key);
    if (!out.metadata.emplace(key, read_value(cursor, type, name, key)).second)
      fail("{}: duplicate key \"{}\"", name, shown(key));
  }
  const uint64_t alignment = alignment_of(out, name);
  std::vector<Entry> entries;
  for (uint64_t i = 0; i < tensors; ++i) entries.push_back(read_entry(cursor, name, alignment));
  refuse_duplicates(entries, name);

  const uint64_t start = checked_round_up(cursor.at(), alignment, name);
  const uint64_t available = start <= file.size() ? file.size() - start : 0;
  for (const Entry& e : entries)
    if (e.size > available || e.offset > available - e.size)
      fail("{}: truncated: {}: {} takes {} bytes at byte {} of the data, the file has {} bytes of data", name,
           shown(e.tensor.name), describe(e.tensor), e.size, e.offset, available);
  refuse_overlaps(entries, name);
  for (Entry& e : entries) {
    if (e.size > 0) e.tensor.bytes = file.subspan(start + e.offset, e.size);
    out.tensors.push_back(std::move(e.tensor));
  }
  return out;
}

std::string gguf_type_text(uint32_t number) {
  if (const TypeRow* const row = type_row(number)) return std::string(row->name);
  const ForeignType* const foreign = foreign_type(number);
  return foreign ? std::string(foreign->name) : text("type {}", number);
}

}  // namespace kt::inline weights
