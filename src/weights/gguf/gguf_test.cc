#include "weights/gguf/gguf.h"

#include <gmock/gmock.h>

#include "formats/gguf_blocks.h"
#include "weights/gguf/gguf_config.h"
#include "weights/testing/files.h"

namespace kt::inline weights {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace testing_files;

GgufHeader parse(const std::string& file) { return parse_gguf(bytes_of(file), "f"); }
std::string message(const GgufBytes& file) {
  return error_of([&] { parse(file.str()); });
}

GgufBytes good() {
  GgufBytes file(2, 5);
  file.pair("general.architecture", "qwen3moe").number("qwen3moe.block_count", 3);
  file.pair("flag", 7, uint8_t{1}).pair("real", 6, 0.5f);
  file.add(GgufBytes::string("words") + raw(uint32_t{9}) + raw(uint32_t{8}) + raw(uint64_t{2}) +
           GgufBytes::string("one") + GgufBytes::string(""));
  file.tensor("a", {32, 2}, 8, 0).tensor("b", {3}, 0, 96);
  return file.data(96 + 12);
}

TEST(Gguf, MetadataAndTensors) {
  for (const uint32_t version : {2u, 3u}) {
    std::string file = good().str();
    std::memcpy(file.data() + 4, &version, 4);
    const GgufHeader header = parse(file);
    EXPECT_EQ(header.version, version);
    EXPECT_EQ(gguf_string(header, "general.architecture"), "qwen3moe");
    EXPECT_EQ(gguf_unsigned(header, "qwen3moe.block_count"), 3u);
    EXPECT_EQ(std::get<bool>(header.metadata.at("flag")), true);
    EXPECT_EQ(std::get<double>(header.metadata.at("real")), 0.5);
    EXPECT_THAT(std::get<GgufArray>(header.metadata.at("words")).strings(), ElementsAre("one", ""));
    ASSERT_EQ(header.tensors.size(), 2u);
    EXPECT_EQ(describe(header.tensors[0]), "Q8_0 [2, 32]");
    EXPECT_EQ(header.tensors[0].bytes.size(), 68u);
    EXPECT_EQ(describe(header.tensors[1]), "F32 [3]");
    EXPECT_EQ(header.tensors[1].bytes.data() + 12, bytes_of(file).data() + file.size());
  }
}

TEST(Gguf, EveryKindOfNumber) {
  GgufBytes file(0, 10);
  file.pair("u8", 0, uint8_t{255}).pair("i8", 1, int8_t{-1}).pair("u16", 2, uint16_t{65535});
  file.pair("i16", 3, int16_t{-2}).pair("u32", 4, ~uint32_t{0}).pair("i32", 5, int32_t{-3});
  file.pair("u64", 10, ~uint64_t{0}).pair("i64", 11, int64_t{-4}).pair("f64", 12, 1e300);
  file.add(GgufBytes::string("list") + raw(uint32_t{9}) + raw(uint32_t{2}) + raw(uint64_t{2}) +
           raw(uint32_t{7}));
  const GgufHeader h = parse(file.str());
  EXPECT_EQ(std::get<uint64_t>(h.metadata.at("u8")), 255u);
  EXPECT_EQ(std::get<int64_t>(h.metadata.at("i8")), -1);
  EXPECT_EQ(std::get<uint64_t>(h.metadata.at("u16")), 65535u);
  EXPECT_EQ(std::get<int64_t>(h.metadata.at("i16")), -2);
  EXPECT_EQ(std::get<uint64_t>(h.metadata.at("u32")), 0xffffffffu);
  EXPECT_EQ(std::get<int64_t>(h.metadata.at("i32")), -3);
  EXPECT_EQ(std::get<uint64_t>(h.metadata.at("u64")), ~uint64_t{0});
  EXPECT_EQ(std::get<int64_t>(h.metadata.at("i64")), -4);
  EXPECT_EQ(std::get<double>(h.metadata.at("f64")), 1e300);
  EXPECT_EQ(std::get<GgufArray>(h.metadata.at("list")).bytes.size(), 4u);
  EXPECT_THAT(error_of([&] { std::get<GgufArray>(h.metadata.at("list")).strings(); }),
              HasSubstr("expected strings"));
}

TEST(Gguf, SizesAgreeWithFormats) {
  for (uint32_t number = 0; number < 64; ++number) {
    const auto type = gguf_type(number);
    if (!type) continue;
    EXPECT_EQ(gguf_type_text(number), name_of(*type));
    GgufBytes file(1, 0);
    file.tensor("t", {static_cast<uint64_t>(gguf_block_size(*type)), 3}, number, 0);
    const std::string whole = file.data(3 * static_cast<size_t>(gguf_block_bytes(*type))).str();
    const GgufHeader header = parse(whole);
    EXPECT_EQ(header.tensors[0].bytes.size(), 3 * static_cast<size_t>(gguf_block_bytes(*type))) << number;
  }
  EXPECT_EQ(gguf_type_text(16), "IQ2_XXS");
  EXPECT_EQ(gguf_type_text(77), "type 77");
  EXPECT_EQ(gguf_type_text(157), "IQ2_KL");
}

TEST(Gguf, RefusesBadStarts) {
  EXPECT_THAT(error_of([] { parse(""); }), HasSubstr("f: truncated: the magic takes 4 bytes"));
  EXPECT_THAT(error_of([] { parse("GGML12345678"); }), HasSubstr("not a GGUF file"));
  EXPECT_THAT(message(GgufBytes(0, 0, 1)), HasSubstr("GGUF version 1, versions 2 and 3 are read"));
  EXPECT_THAT(message(GgufBytes(0, 0, 4)), HasSubstr("GGUF version 4"));
  EXPECT_THAT(message(GgufBytes(0, 0, 0)), HasSubstr("GGUF version 0"));
  EXPECT_THAT(message(GgufBytes(0, 0, 0x03000000)), HasSubstr("a big-endian GGUF file (version 3)"));
  EXPECT_EQ(message(GgufBytes(0, 0)), "no error");
  EXPECT_THAT(message(GgufBytes(1, 0)),
              HasSubstr("0 metadata keys and 1 tensors cannot be in the 0 bytes left"));
  EXPECT_THAT(message(GgufBytes(~uint64_t{0}, 0).data(4096)),
              HasSubstr("18446744073709551615 tensors cannot be"));
  EXPECT_THAT(message(GgufBytes(0, uint64_t{1} << 60).data(4096)), HasSubstr("metadata keys and"));
}

TEST(Gguf, RefusesBadMetadata) {
  EXPECT_EQ(message(GgufBytes(0, 2).number("k", 1).number("k", 1)), "f: duplicate key \"k\"");
  EXPECT_THAT(message(GgufBytes(0, 1).pair("k", 13, uint64_t{0})), HasSubstr("f: k: unknown value type 13"));
  EXPECT_THAT(message(GgufBytes(0, 1).pair("k", 7, uint8_t{2})), HasSubstr("f: k: the boolean 2"));
  EXPECT_THAT(message(GgufBytes(0, 1).add(raw(~uint64_t{0})).data(64)), HasSubstr("characters at byte"));
  EXPECT_THAT(message(GgufBytes(0, 1).add(raw(uint64_t{60000})).data(64)),
              HasSubstr("truncated: a metadata key takes 60000"));
  EXPECT_THAT(message(GgufBytes(0, 1).pair("k", 8, ~uint64_t{0}).data(64)),
              HasSubstr("truncated: k takes 18446744073709551615"));
  const auto array = [](uint32_t type, uint64_t count) {
    return GgufBytes(0, 1).add(GgufBytes::string("k") + raw(uint32_t{9}) + raw(type) + raw(count)).data(64);
  };
  EXPECT_THAT(message(array(4, uint64_t{1} << 62)),
              HasSubstr("an array of 4611686018427387904 elements of 4 bytes"));
  EXPECT_THAT(message(array(8, uint64_t{1} << 62)), HasSubstr("an array of 4611686018427387904 strings"));
  EXPECT_THAT(message(array(8, 7)), HasSubstr("truncated: k takes"));
  EXPECT_THAT(message(array(9, 1)), HasSubstr("an array of arrays, type 9"));
  EXPECT_THAT(message(array(99, 1)), HasSubstr("unknown type 99"));
  for (const uint32_t alignment : {0u, 3u, 48u})
    EXPECT_THAT(message(GgufBytes(0, 1).number("general.alignment", alignment)),
                HasSubstr("not a power of two"));
  EXPECT_THAT(message(GgufBytes(0, 1).pair("general.alignment", "8")), HasSubstr("not an unsigned number"));
}

TEST(Gguf, RefusesKeysThatAreNone) {
  EXPECT_EQ(message(GgufBytes(0, 2).number("a", 1).number("", 1)), "f: metadata key 1 is empty");
  EXPECT_THAT(message(GgufBytes(0, 1).number("a\xc3", 1)), HasSubstr("f: metadata key 0 is not UTF-8"));
}

TEST(Gguf, ValuesOfTheWrongKindAreNoMissingOnes) {
  GgufBytes file(0, 4);
  file.number("n", 3).pair("i", 5, int32_t{-1}).pair("s", "word").pair("bad", "w\xff");
  const GgufHeader h = parse(file.str());
  EXPECT_EQ(gguf_unsigned(h, "n"), 3u);
  EXPECT_EQ(gguf_real(h, "i"), -1.0);
  EXPECT_EQ(gguf_unsigned(h, "absent"), std::nullopt);
  EXPECT_EQ(error_of([&] { gguf_unsigned(h, "i"); }), "f: i is -1, expected a whole number of at least 0");
  EXPECT_EQ(error_of([&] { gguf_unsigned(h, "s"); }),
            "f: s is \"word\", expected a whole number of at least 0");
  EXPECT_EQ(error_of([&] { gguf_string(h, "n"); }), "f: n is 3, expected a string");
  EXPECT_EQ(error_of([&] { gguf_string(h, "bad"); }), "f: bad is not UTF-8");
  EXPECT_EQ(error_of([&] { gguf_token_id(h, "n", 3); }), "f: n is 3, there are 3 tokens");
}

TEST(Gguf, RefusesBadTensors) {
  const auto one = [](std::initializer_list<uint64_t> dimensions, uint32_t type, uint64_t offset) {
    return message(GgufBytes(1, 0).tensor("t", dimensions, type, offset).data(128));
  };
  EXPECT_EQ(one({32}, 0, 0), "no error");
  EXPECT_EQ(one({}, 0, 0), "no error");
  EXPECT_EQ(one({0, 5}, 0, 0), "no error");
  EXPECT_EQ(one({1, 1, 1, 1}, 0, 96), "no error");
  EXPECT_THAT(one({1, 1, 1, 1, 1}, 0, 0), HasSubstr("f: t: 5 dimensions, at most 4 are read"));
  EXPECT_THAT(one({33}, 0, 0), HasSubstr("truncated: t: F32 [33] takes 132 bytes at byte 0 of the data"));
  EXPECT_THAT(one({32}, 0, 32), HasSubstr("the file has 128 bytes of data"));
  EXPECT_THAT(one({1}, 0, ~uint64_t{0} - 31), HasSubstr("truncated"));
  EXPECT_THAT(one({1}, 0, 31), HasSubstr("offset 31 is not a multiple of the alignment 32"));
  EXPECT_THAT(one({31}, 8, 0), HasSubstr("rows of 31 columns are not whole blocks of 32 columns of Q8_0"));
  EXPECT_THAT(one({1}, 77, 0), HasSubstr("t: unknown tensor type 77"));
  EXPECT_THAT(one({1}, 4, 0), HasSubstr("t: unknown tensor type 4"));
  EXPECT_EQ(one({256}, 139, 0), "f: t: IQ4_K (139) is a type of ik_llama.cpp, which no other program reads");
  EXPECT_EQ(one({256}, 212, 0),
            "f: t: Q4_K_R4 (212) is a type of ik_llama.cpp, which no other program reads");
  EXPECT_THAT(one({uint64_t{1} << 63}, 0, 0), HasSubstr("a dimension of 9223372036854775808"));
  EXPECT_THAT(one({uint64_t{1} << 32, uint64_t{1} << 31}, 0, 0), HasSubstr("overflows 63 bits"));
  EXPECT_THAT(one({uint64_t{1} << 62}, 28, 0), HasSubstr("overflows 64 bits"));
  EXPECT_EQ(message(GgufBytes(2, 0).tensor("t", {1}, 0, 0).tensor("t", {1}, 0, 32).data(64)),
            "f: two tensors of the name t");
  EXPECT_EQ(message(GgufBytes(2, 0).tensor("t", {9}, 0, 0).tensor("u", {1}, 0, 32).data(64)),
            "f: u begins at byte 32 of the data, inside t, which ends at 36");
  const auto named = [](std::string_view name) {
    return message(GgufBytes(1, 0).tensor(name, {1}, 0, 0).data(64));
  };
  EXPECT_EQ(named(std::string(kMostTensorName, 'n')), "no error");
  EXPECT_THAT(named(std::string(kMostTensorName + 1, 'n')),
              HasSubstr("f: a tensor's name of 1025 characters at byte"));
  EXPECT_THAT(named("t\xff"), HasSubstr("f: the name of a tensor is not UTF-8"));
}

TEST(Gguf, OwnAlignment) {
  GgufBytes file(2, 1);
  file.number("general.alignment", 8).tensor("t", {2}, 0, 0).tensor("u", {2}, 0, 8);
  EXPECT_EQ(message(file.data(16, 8)), "no error");
}

TEST(Gguf, EveryTruncation) {
  const std::string file = good().str();
  for (size_t size = 0; size < file.size(); ++size)
    EXPECT_THAT(error_of([&] { parse(file.substr(0, size)); }), testing::StartsWith("f: ")) << size;
}

TEST(Gguf, EveryBitFlip) {
  const std::string whole = good().str();
  for (size_t bit = 0; bit < 8 * (whole.size() - 108); ++bit) {
    std::string file = whole;
    file[bit / 8] = static_cast<char>(file[bit / 8] ^ 1 << bit % 8);
    try {
      for (const Tensor& t : parse(file).tensors) {
        if (t.bytes.empty()) continue;
        ASSERT_GE(t.bytes.data(), bytes_of(file).data());
        ASSERT_LE(t.bytes.data() + t.bytes.size(), bytes_of(file).data() + file.size());
      }
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::StartsWith("f: "));
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    }
  }
}

TEST(GgufConfig, MetadataInTheWordsOfConfigJson) {
  GgufBytes file(0, 10);
  file.pair("general.architecture", "deepseek2").number("deepseek2.block_count", 62);
  file.number("deepseek2.embedding_length", 7168).number("deepseek2.expert_count", 256);
  file.number("deepseek2.expert_used_count", 8).number("deepseek2.expert_feed_forward_length", 2048);
  file.number("deepseek2.leading_dense_block_count", 3).number("deepseek2.nextn_predict_layers", 1);
  file.number("deepseek2.expert_gating_func", 2).pair("deepseek2.expert_weights_scale", 6, 2.5f);
  const Json config = gguf_config(parse(file.str()));
  EXPECT_EQ(config, Json::parse(
                        R"({"model_type":"deepseek2","num_hidden_layers":61,"hidden_size":7168,
    "num_experts":256,"num_experts_per_tok":8,"moe_intermediate_size":2048,"first_k_dense_replace":3,
    "num_nextn_predict_layers":1,"scoring_func":"sigmoid","routed_scaling_factor":2.5})"));
}

TEST(GgufConfig, WordsOfArchitectures) {
  const auto type_of = [](std::string_view architecture, uint32_t experts) {
    GgufBytes file(0, 2);
    file.pair("general.architecture", architecture)
        .number(std::string(architecture) + ".expert_count", experts);
    return gguf_config(parse(file.str())).dump();
  };
  EXPECT_EQ(type_of("llama", 0), R"({"model_type":"llama","num_experts":0})");
  EXPECT_EQ(type_of("bailingmoe2", 8), R"({"model_type":"bailing_moe","num_experts":8})");
  EXPECT_EQ(type_of("unheard-of", 4), R"({"model_type":"unheard-of","num_experts":4})");
  EXPECT_EQ(gguf_config(parse(GgufBytes().str())), Json::object());
}

TEST(GgufConfig, OneNumberForAllLayers) {
  const auto array = [](uint32_t first, uint32_t second) {
    GgufBytes file(0, 2);
    file.pair("general.architecture", "x");
    file.add(GgufBytes::string("x.attention.head_count_kv") + raw(uint32_t{9}) + raw(uint32_t{4}) +
             raw(uint64_t{2}) + raw(first) + raw(second));
    return gguf_config(parse(file.str()));
  };
  EXPECT_EQ(array(8, 8)["num_key_value_heads"], 8);
  EXPECT_FALSE(array(8, 9).contains("num_key_value_heads"));
}

}  // namespace
}  // namespace kt::inline weights
