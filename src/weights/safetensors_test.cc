#include "weights/safetensors.h"

#include <gmock/gmock.h>

#include <random>
#include <thread>

#include "base/sha256.h"
#include "weights/testing/files.h"

namespace kt::inline weights {
namespace {

using testing::HasSubstr;
using namespace testing_files;

constexpr std::string_view kTwo =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]},)"
    R"("a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}})";
constexpr std::string_view kTwelve = "0123456789ab";

SafetensorsHeader parse(const std::string& file) { return parse_safetensors(bytes_of(file), "f"); }
std::string header_error(const std::string& file) {
  return error_of([&] { parse(file); });
}
std::string message_of_header(std::string_view header, std::string_view data = kTwelve) {
  return header_error(safetensors_file(header, data));
}
std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::string_view offsets) {
  return text("\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":{}}}", name, dtype, shape, offsets);
}

TEST(Safetensors, TensorsInTheOrderOfTheirBytes) {
  const std::string file = safetensors_file(kTwo, kTwelve);
  const SafetensorsHeader header = parse(file);
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(describe(header.tensors[0]), "F32 [2, 1]");
  EXPECT_EQ(header.tensors[1].name, "b");
  EXPECT_EQ(std::memcmp(header.tensors[1].bytes.data(), "89ab", 4), 0);
  EXPECT_EQ(header.metadata, (Metadata{{"format", "pt"}}));
}

TEST(Safetensors, OddButValid) {
  EXPECT_EQ(message_of_header("{}", ""), "no error");
  EXPECT_EQ(message_of_header("{}     ", ""), "no error");
  EXPECT_EQ(message_of_header(R"({"__metadata__":null})", ""), "no error");
  EXPECT_EQ(message_of_header("{" + entry("s", "F64", "[]", "[0,8]") + "}", "01234567"), "no error");
  EXPECT_EQ(
      message_of_header("{" + entry("e", "F64", "[0,3]", "[0,0]") + "," + entry("f", "U8", "[0]", "[0,0]") +
                            "," + entry("g", "F4", "[3,2]", "[0,3]") + "}",
                        "012"),
      "no error");
}

TEST(Safetensors, RefusesBadHeaders) {
  EXPECT_EQ(header_error("1234567"), "f: 7 bytes, a safetensors file has at least 8");
  EXPECT_THAT(header_error(raw(uint64_t{100'000'001}) + "{}"),
              HasSubstr("claims 100000001 bytes, at most 100000000"));
  EXPECT_THAT(header_error(raw(~uint64_t{0}) + "{}"), HasSubstr("claims 18446744073709551615 bytes"));
  EXPECT_THAT(header_error(raw(uint64_t{3}) + "{}"), HasSubstr("claims 3 bytes, 2 follow"));
  EXPECT_THAT(message_of_header(""), HasSubstr("does not start with '{'"));
  EXPECT_THAT(message_of_header(" {}"), HasSubstr("does not start with '{'"));
  EXPECT_THAT(message_of_header("[]"), HasSubstr("does not start with '{'"));
  EXPECT_THAT(message_of_header("{]"), HasSubstr("f: not JSON at byte "));
  EXPECT_THAT(message_of_header("{}{}"), HasSubstr("not JSON"));
  EXPECT_THAT(message_of_header(std::string_view("{}\0\0", 4), ""), HasSubstr("a zero byte"));
  for (const char* bad :
       {R"({"a":1})", R"({"a":[]})", R"({"a":"x"})", R"({"a":null})", R"({"a":true})",
        R"({"__metadata__":{"a":1}})", R"({"__metadata__":{"a":{}}})", R"({"__metadata__":[]})",
        R"({"a":{"dtype":1}})", R"({"a":{"shape":{}}})", R"({"a":{"shape":[[1]]}})",
        R"({"a":{"shape":[-1]}})", R"({"a":{"shape":[1.5]}})", R"({"a":{"data_offsets":"x"}})",
        R"({"a":{"shape":[18446744073709551615]}})", R"({"a":{"shape":[99999999999999999999]}})",
        R"({"a":{"data_offsets":[1,2,3]}})", R"({"a":{"dtype":{}}})"})
    EXPECT_THAT(message_of_header(bad), HasSubstr("f: the header has ")) << bad;
  EXPECT_THAT(message_of_header(R"({"a":{}})"), HasSubstr("f: a: dtype, shape or data_offsets is missing"));
  EXPECT_THAT(message_of_header(R"({"a":{"dtype":"U8","data_offsets":[0,0]}})"), HasSubstr("is missing"));
  EXPECT_THAT(message_of_header(R"({"a":{"data_offsets":[1]}})"), HasSubstr("holds 1 numbers, expected 2"));
  EXPECT_THAT(message_of_header(R"({"a":{"extra":1}})"), HasSubstr("f: a: unknown key \"extra\""));
  EXPECT_THAT(message_of_header("{" + entry("a", "F7", "[1]", "[0,1]") + "}"),
              HasSubstr("f: a: unknown dtype \"F7\""));
  EXPECT_THAT(message_of_header("{" + entry("a", "GGUF", "[1]", "[0,1]") + "}"),
              HasSubstr("unknown dtype \"GGUF\""));
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_THAT(message_of_header("{" + entry("a", "U8", ones + "]", "[0,1]") + "}"),
              HasSubstr("more than 64 dimensions"));
}

TEST(Safetensors, RefusesDuplicateKeys) {
  const std::string a = entry("a", "U8", "[6]", "[0,6]");
  EXPECT_EQ(message_of_header("{" + a + "," + entry("a", "U8", "[6]", "[6,12]") + "}"),
            "f: duplicate key \"a\"");
  EXPECT_EQ(message_of_header("{" + a + "," + entry("\\u0061", "U8", "[6]", "[6,12]") + "}"),
            "f: duplicate key \"a\"");
  EXPECT_THAT(message_of_header(R"({"__metadata__":{},"__metadata__":{}})"),
              HasSubstr("duplicate key \"__metadata__\""));
  EXPECT_THAT(message_of_header(R"({"__metadata__":{"k":"1","k":"2"}})"), HasSubstr("duplicate key \"k\""));
  EXPECT_THAT(message_of_header(R"({"a":{"dtype":"U8","dtype":"U8"}})"),
              HasSubstr("duplicate key \"a: dtype\""));
  EXPECT_THAT(message_of_header(R"({"a":{"shape":[1],"shape":[1]}})"),
              HasSubstr("duplicate key \"a: shape\""));
}

TEST(Safetensors, RefusesBadSizes) {
  const auto one = [](std::string_view dtype, std::string_view shape, std::string_view offsets) {
    return message_of_header("{" + entry("t", dtype, shape, offsets) + "}");
  };
  EXPECT_EQ(one("F32", "[3]", "[0,12]"), "no error");
  EXPECT_EQ(one("F32", "[4]", "[0,12]"), "f: t: F32 [4] takes 16 bytes, data_offsets [0, 12] hold 12");
  EXPECT_THAT(one("F32", "[4]", "[0,16]"), HasSubstr("[0, 16] are not within the 12 bytes of data"));
  EXPECT_THAT(one("U8", "[1]", "[8,4]"), HasSubstr("[8, 4] are not within"));
  EXPECT_THAT(one("U8", "[1]", "[18446744073709551615,0]"), HasSubstr("not within"));
  EXPECT_THAT(one("F4", "[3]", "[0,1]"), HasSubstr("F4 [3] does not fill whole bytes"));
  EXPECT_THAT(one("U8", "[4294967296,4294967296]", "[0,12]"),
              HasSubstr("[4294967296, 4294967296] overflows 64 bits"));
  EXPECT_THAT(one("F64", "[9223372036854775807]", "[0,12]"), HasSubstr("overflows 64 bits"));
  EXPECT_THAT(one("F32", "[2305843009213693952,8,0]", "[0,0]"), HasSubstr("overflows 64 bits"));
}

TEST(Safetensors, RefusesHolesOverlapsAndOpenEnds) {
  const auto two = [](std::string_view a, std::string_view sa, std::string_view b, std::string_view sb) {
    return message_of_header("{" + entry("a", "U8", sa, a) + "," + entry("b", "U8", sb, b) + "}");
  };
  EXPECT_EQ(two("[0,6]", "[6]", "[6,12]", "[6]"), "no error");
  EXPECT_EQ(two("[6,12]", "[6]", "[0,6]", "[6]"), "no error");
  EXPECT_EQ(two("[0,6]", "[6]", "[5,12]", "[7]"),
            "f: b begins at byte 5 of the data, inside a, which ends at 6");
  EXPECT_EQ(two("[0,12]", "[12]", "[0,12]", "[12]"),
            "f: b begins at byte 0 of the data, inside a, which ends at 12");
  EXPECT_EQ(two("[0,5]", "[5]", "[6,12]", "[6]"),
            "f: a hole of 1 bytes before b, which begins at byte 6 of the data");
  EXPECT_THAT(two("[1,6]", "[5]", "[6,12]", "[6]"), HasSubstr("a hole of 1 bytes before a"));
  EXPECT_EQ(two("[0,6]", "[6]", "[6,11]", "[5]"),
            "f: tensors end at byte 11 of the data, the file has 12 bytes of data");
  EXPECT_THAT(two("[0,12]", "[12]", "[6,6]", "[0]"), HasSubstr("inside a"));
  EXPECT_THAT(message_of_header("{}"), HasSubstr("the file has 12 bytes of data"));
}

// Any prefix is an error, and so is any added byte.
TEST(Safetensors, EveryTruncation) {
  const std::string file = safetensors_file(kTwo, kTwelve);
  for (size_t size = 0; size < file.size(); ++size)
    EXPECT_NE(header_error(file.substr(0, size)), "no error") << size;
  EXPECT_NE(header_error(file + "x"), "no error");
}

// Whatever one wrong bit makes of the header, the parser answers with an Error or with views into the file.
TEST(Safetensors, EveryBitFlip) {
  const std::string good = safetensors_file(kTwo, kTwelve);
  int accepted = 0;
  for (size_t bit = 0; bit < 8 * (good.size() - kTwelve.size()); ++bit) {
    std::string file = good;
    file[bit / 8] = static_cast<char>(file[bit / 8] ^ 1 << bit % 8);
    try {
      for (const Tensor& t : parse(file).tensors) {
        ASSERT_GE(t.bytes.data(), bytes_of(file).data());
        ASSERT_LE(t.bytes.data() + t.bytes.size(), bytes_of(file).data() + file.size());
      }
      ++accepted;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::StartsWith("f: "));
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    }
  }
  // Letters of names and metadata may change freely; nearly nothing else.
  EXPECT_LT(accepted, 150);
}

TEST(Safetensors, NamesFromFilesStayOnOneLine) {
  EXPECT_EQ(message_of_header("{" + entry("a\\nb\\u0007", "F7", "[1]", "[0,1]") + "}"),
            "f: a\\x0ab\\x07: unknown dtype \"F7\"");
  EXPECT_LT(message_of_header("{" + entry(std::string(100000, 'n'), "F7", "[1]", "[0,1]") + "}").size(),
            300u);
}

TEST(Safetensors, NamesAreBounded) {
  const auto with_name = [](size_t length) {
    return message_of_header("{" + entry(std::string(length, 'n'), "U8", "[12]", "[0,12]") + "}");
  };
  EXPECT_EQ(with_name(kMostTensorName), "no error");
  EXPECT_THAT(with_name(kMostTensorName + 1),
              HasSubstr("f: a tensor's name of 1025 bytes, at most 1024 are read"));
}

TEST(SafetensorsWriting, HeaderFillsMultiplesOf64) {
  for (size_t i = 0; i < 70; ++i) {
    const std::string header = safetensors_header({{std::string(i, 'n'), Dtype::kU8, {0}}}, {});
    EXPECT_EQ(header.size() % 64, 0u);
    EXPECT_EQ(parse(header).tensors.size(), 1u);
  }
  EXPECT_EQ(safetensors_header({}, {}).size(), 64u);
}

TEST(SafetensorsWriting, RefusesWhatNobodyCouldRead) {
  const auto header_of = [](std::vector<TensorSpec> specs, Metadata metadata = {}) {
    return error_of([&] { safetensors_header(specs, metadata); });
  };
  EXPECT_THAT(header_of({{"a", Dtype::kU8, {1}}, {"a", Dtype::kU8, {1}}}), HasSubstr("two tensors"));
  EXPECT_THAT(header_of({{"__metadata__", Dtype::kU8, {1}}}), HasSubstr("of one name"));
  EXPECT_THAT(header_of({{"a\xff", Dtype::kU8, {1}}}), HasSubstr("is not UTF-8"));
  EXPECT_THAT(header_of({}, {{"k", "\xc3"}}), HasSubstr("is not UTF-8"));
  EXPECT_THAT(header_of({{"a", Dtype::kF4, {3}}}), HasSubstr("whole bytes"));
  EXPECT_THAT(header_of({{"a", Dtype::kU8, {-1}}}), HasSubstr("negative"));
  EXPECT_THAT(header_of({{"a", Dtype::kF64, {1ll << 62}}}), HasSubstr("overflows"));
  EXPECT_THAT(header_of({{"a", Dtype::kGguf, {1}}}), HasSubstr("no safetensors dtype"));
}

TEST(SafetensorsWriting, FromSeveralThreadsAndReadBack) {
  const TempFolder folder;
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 23; ++i) specs.push_back({text("t.{}", i), Dtype::kF16, {i, 97}});
  const std::string path = folder.at("out.safetensors");
  SafetensorsWriter writer(path, specs, {{"k", "v\""}});
  const auto value = [](size_t tensor, size_t i) { return static_cast<std::byte>(tensor * 7 + i); };
  std::vector<std::thread> threads;
  for (size_t part = 0; part < 4; ++part)
    threads.emplace_back([&, part] {
      for (size_t t = 0; t < specs.size(); ++t) {
        const size_t size = byte_count(specs[t]), first = size * part / 4, last = size * (part + 1) / 4;
        std::vector<std::byte> bytes;
        for (size_t i = first; i < last; ++i) bytes.push_back(value(t, i));
        writer.write(t, first, bytes);
      }
    });
  for (std::thread& t : threads) t.join();
  const std::string digest = writer.digest();
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.commit();

  const MappedFile file(path);
  EXPECT_EQ(file.size(), writer.size());
  Sha256 sha;
  sha.add(file.bytes());
  EXPECT_EQ(sha.hex(), digest);
  const SafetensorsHeader header = parse_safetensors(file.bytes(), path);
  EXPECT_EQ(header.metadata, (Metadata{{"k", "v\""}}));
  ASSERT_EQ(header.tensors.size(), specs.size());
  for (size_t t = 0; t < specs.size(); ++t) {
    EXPECT_EQ(header.tensors[t].name, specs[t].name);
    EXPECT_EQ(header.tensors[t].shape, specs[t].shape);
    for (size_t i = 0; i < header.tensors[t].bytes.size(); ++i)
      ASSERT_EQ(header.tensors[t].bytes[i], value(t, i));
  }
}

TEST(SafetensorsWriting, IncompleteFilesNeverAppear) {
  const TempFolder folder;
  const std::string path = folder.at("out.safetensors");
  {
    SafetensorsWriter writer(path, {{"a", Dtype::kU8, {4}}}, {});
    const std::byte three[3] = {};
    writer.write(0, 0, three);
    EXPECT_THAT(error_of([&] { writer.commit(); }), HasSubstr("bytes were written"));
    EXPECT_THAT(error_of([&] { writer.write(0, 2, three); }), HasSubstr("3 bytes at 2 of 4"));
    EXPECT_THAT(error_of([&] { writer.write(1, 0, three); }), HasSubstr("tensor 1 of 1"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace kt::inline weights
