// Layers loaded from files of every dialect, against nn/experts loaded with the matrices that the files were
// written from. The files are written here, from their definitions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>

#include "base/testing/error_of.h"
#include "hybrid/testing/test_layer.h"
#include "weights/testing/files.h"
#include "weights/testing/tiny_model.h"

namespace kt::inline hybrid {
namespace {

using testing_files::GgufBytes;
using testing_files::raw;

constexpr ExpertsShape kStoredShape{.experts = 4, .hidden = 256, .inter = 128};
constexpr int kLayer = 1;
constexpr const char* kNames[] = {"gate", "up", "down"};

// Matrices of all experts: 3 e + p is projection p of expert e.
struct StoredExperts {
  std::array<Format, 3> formats;  // of gate, up and down
  std::vector<Matrix> matrices;

  explicit StoredExperts(const std::array<const char*, 3>& names) {
    for (size_t p = 0; p < 3; ++p) formats[p] = format_named(names[p]);
    for (unsigned i = 0; i < 3 * kStoredShape.experts; ++i) {
      const bool is_down = i % 3 == 2;
      const int64_t n = is_down ? kStoredShape.hidden : kStoredShape.inter,
                    k = is_down ? kStoredShape.inter : kStoredShape.hidden;
      matrices.push_back(quantise(formats[i % 3], random_values(static_cast<size_t>(n * k), i, 0.1f), n, k));
    }
  }
  const Matrix& at(size_t expert, size_t projection) const { return matrices[3 * expert + projection]; }
};

struct StoredTensor {
  std::string suffix;
  Dtype dtype;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};
using Store = std::vector<StoredTensor> (*)(const Matrix&);

// Columns 2 i and 2 i + 1 in a byte, the first one low; eight of a row in a little-endian word too.
std::vector<uint8_t> nibbles(const std::vector<uint8_t>& codes) {
  std::vector<uint8_t> out(codes.size() / 2);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  return out;
}

template <typename T>
std::vector<T> transposed(const std::vector<T>& from, int64_t rows, int64_t columns) {
  std::vector<T> out(from.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      out[static_cast<size_t>(c * rows + r)] = from[static_cast<size_t>(r * columns + c)];
  return out;
}

std::vector<StoredTensor> store_bf16(const Matrix& m) {
  return {{"weight", Dtype::kBf16, {m.n, m.k}, m.codes}};
}
std::vector<StoredTensor> store_fp8(const Matrix& m) {
  return {{"weight", Dtype::kE4m3, {m.n, m.k}, m.codes},
          {"weight_scale_inv", Dtype::kF32, {(m.n + 127) / 128, (m.k + 127) / 128}, m.scales}};
}
std::vector<StoredTensor> store_fp8_rows(const Matrix& m) {
  return {{"weight", Dtype::kE4m3, {m.n, m.k}, m.codes}, {"weight_scale", Dtype::kF32, {m.n, 1}, m.scales}};
}
std::vector<StoredTensor> store_mxfp8(const Matrix& m) {
  return {{"weight", Dtype::kE4m3, {m.n, m.k}, m.codes},
          {"weight_scale_inv", Dtype::kU8, {m.n, m.k / 32}, m.scales}};
}
std::vector<StoredTensor> store_mxfp4(const Matrix& m) {
  return {{"weight", Dtype::kU8, {m.n, m.k / 2}, nibbles(m.codes)},
          {"scale", Dtype::kE8m0, {m.n, m.k / 32}, m.scales}};
}
std::vector<StoredTensor> store_compressed(const Matrix& m) {
  std::vector<uint8_t> shape(16);
  std::memcpy(shape.data(), &m.n, 8);
  std::memcpy(shape.data() + 8, &m.k, 8);
  return {{"weight_packed", Dtype::kI32, {m.n, m.k / 8}, nibbles(m.codes)},
          {"weight_scale", Dtype::kBf16, {m.n, m.k / 32}, m.scales},
          {"weight_shape", Dtype::kI64, {2}, shape}};
}

// Words of eight columns stand [k / 8, n], zero points eight rows in a word, scales [groups, n].
std::vector<StoredTensor> store_gptq(const Matrix& m) {
  const int64_t groups = m.k / m.format.span.k;
  std::vector<uint32_t> words(static_cast<size_t>(m.n * m.k / 8));
  std::vector<uint16_t> scales(static_cast<size_t>(m.n * groups));
  const std::vector<uint8_t> packed = nibbles(m.codes);
  std::memcpy(words.data(), packed.data(), packed.size());
  std::memcpy(scales.data(), m.scales.data(), m.scales.size());
  const auto bytes = [](const auto& values) {
    std::vector<uint8_t> out(values.size() * sizeof(values[0]));
    std::memcpy(out.data(), values.data(), out.size());
    return out;
  };
  std::vector<int32_t> index;
  for (int64_t c = 0; c < m.k; ++c) index.push_back(static_cast<int32_t>(c / m.format.span.k));
  return {{"qweight", Dtype::kI32, {m.k / 8, m.n}, bytes(transposed(words, m.n, m.k / 8))},
          {"qzeros", Dtype::kI32, {groups, m.n / 8}, nibbles(transposed(m.mins, m.n, groups))},
          {"scales", Dtype::kF16, {groups, m.n}, bytes(transposed(scales, m.n, groups))},
          {"g_idx", Dtype::kI32, {m.k}, bytes(index)}};
}

void write_folder(const StoredExperts& experts, const std::array<Store, 3>& stores, const Json& quantization,
                  const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::vector<TensorSpec> specs;
  std::vector<std::vector<uint8_t>> bytes;
  for (size_t e = 0; e < kStoredShape.experts; ++e)
    for (size_t p = 0; p < 3; ++p)
      for (StoredTensor& tensor : stores[p](experts.at(e, p))) {
        specs.push_back(
            {text("model.layers.{}.mlp.experts.{}.{}_proj.{}", kLayer, e, kNames[p], tensor.suffix),
             tensor.dtype, tensor.shape});
        bytes.push_back(std::move(tensor.bytes));
      }
  SafetensorsWriter writer(folder + "/model.safetensors", specs, {});
  for (size_t i = 0; i < specs.size(); ++i) writer.write(i, 0, std::as_bytes(std::span(bytes[i])));
  writer.commit();
  Json config = {{"model_type", "qwen3_moe"},
                 {"hidden_size", kStoredShape.hidden},
                 {"moe_intermediate_size", kStoredShape.inter},
                 {"num_experts", kStoredShape.experts},
                 {"num_experts_per_tok", 2},
                 {"num_hidden_layers", 2}};
  if (!quantization.is_null()) config["quantization_config"] = quantization;
  write_atomically(folder + "/config.json", config.dump(1));
}

// Blocks of 32: a factor, then the codes; of q4_0 the first 16 low, the others high.
std::string q4_0_blocks(const Matrix& m) {
  std::string out;
  for (size_t block = 0; block < m.codes.size() / 32; ++block) {
    out.append(reinterpret_cast<const char*>(m.scales.data()) + 2 * block, 2);
    const uint8_t* const codes = m.codes.data() + 32 * block;
    for (int i = 0; i < 16; ++i) out.push_back(static_cast<char>(codes[i] | codes[i + 16] << 4));
  }
  return out;
}
std::string q8_0_blocks(const Matrix& m) {
  std::string out;
  for (size_t block = 0; block < m.codes.size() / 32; ++block) {
    out.append(reinterpret_cast<const char*>(m.scales.data()) + 2 * block, 2);
    out.append(reinterpret_cast<const char*>(m.codes.data()) + 32 * block, 32);
  }
  return out;
}
// Blocks of 256: low nibbles and high pairs of bits of two halves, 16 scales, a factor.
std::string q6_k_blocks(const Matrix& m) {
  std::string out;
  for (size_t block = 0; block < m.codes.size() / 256; ++block) {
    const uint8_t* const all = m.codes.data() + 256 * block;
    std::string low, high;
    for (const uint8_t* const half : {all, all + 128}) {
      for (int i = 0; i < 64; ++i)
        low.push_back(static_cast<char>((half[i] & 15) | (half[i + 64] & 15) << 4));
      for (int i = 0; i < 32; ++i)
        high.push_back(static_cast<char>(half[i] >> 4 | half[i + 32] >> 4 << 2 | half[i + 64] >> 4 << 4 |
                                         half[i + 96] >> 4 << 6));
    }
    out += low + high;
    out.append(reinterpret_cast<const char*>(m.scales.data()) + 16 * block, 16);
    out.append(reinterpret_cast<const char*>(m.supers.data()) + 2 * block, 2);
  }
  return out;
}

struct BlockWriter {
  uint32_t number;
  std::string (*blocks)(const Matrix&);
};

void write_gguf(const StoredExperts& experts, const std::array<BlockWriter, 3>& types,
                const std::string& path) {
  std::string data;
  uint64_t offsets[3];
  for (size_t p = 0; p < 3; ++p) {
    offsets[p] = data.size();
    for (size_t e = 0; e < kStoredShape.experts; ++e) data += types[p].blocks(experts.at(e, p));
    data.resize((data.size() + 31) / 32 * 32);
  }
  GgufBytes file(3, 6);
  file.pair("general.architecture", "qwen3moe").number("qwen3moe.block_count", 2);
  file.number("qwen3moe.embedding_length", kStoredShape.hidden)
      .number("qwen3moe.expert_count", kStoredShape.experts);
  file.number("qwen3moe.expert_used_count", 2)
      .number("qwen3moe.expert_feed_forward_length", kStoredShape.inter);
  constexpr uint64_t kHidden = kStoredShape.hidden, kInter = kStoredShape.inter,
                     kExperts = kStoredShape.experts;
  file.tensor("blk.1.ffn_gate_exps.weight", {kHidden, kInter, kExperts}, types[0].number, offsets[0]);
  file.tensor("blk.1.ffn_up_exps.weight", {kHidden, kInter, kExperts}, types[1].number, offsets[1]);
  file.tensor("blk.1.ffn_down_exps.weight", {kInter, kHidden, kExperts}, types[2].number, offsets[2]);
  file.data(0).add(data);
  std::ofstream(path, std::ios::binary) << file.str();
}

void expect_bits(const char* method, const StoredExperts& stored, const std::string& path) {
  const std::vector<int64_t> map = {2, 0, 0, 3};
  const TestBatch batch(5, 7, kStoredShape);
  for (const int nodes : {1, 2}) {
    const auto team = CpuTeam::shared({.threads = 2, .nodes = nodes});
    ExpertLayer layer(
        team, {.layer = kLayer, .shape = kStoredShape, .top_k = 4, .method = method, .weights = path});
    layer.load(map);
    Experts plain(
        team->pool(), team->workspace(), kStoredShape,
        {.gate = stored.formats[0], .up = stored.formats[1], .down = stored.formats[2], .max_tokens = 512});
    for (size_t slot = 0; slot < map.size(); ++slot) {
      const auto e = static_cast<size_t>(map[slot]);
      plain.load(static_cast<int>(slot), ExpertWeights{.gate = stored.at(e, 0).view(),
                                                       .up = stored.at(e, 1).view(),
                                                       .down = stored.at(e, 2).view()});
    }
    std::vector<float> got(batch.input.size()), want(got);
    layer.forward(batch.call(), got.data());
    plain.forward({.tokens = batch.tokens,
                   .top_k = batch.top_k,
                   .input = batch.input.data(),
                   .ids64 = batch.ids.data(),
                   .weights = batch.weights.data(),
                   .output = want.data()});
    EXPECT_EQ(got, want) << method << ", nodes " << nodes;
    EXPECT_NE(want, std::vector<float>(want.size())) << method;
  }
}

// Written back for a GPU as bf16, for one rank: gate above up, and down.
void expect_bf16_back(const StoredExperts& stored, const std::string& path) {
  ExpertLayer layer(
      CpuTeam::shared({.threads = 2}),
      {.layer = kLayer, .shape = kStoredShape, .top_k = 4, .method = "LLAMAFILE", .weights = path});
  layer.load({});
  const size_t size = static_cast<size_t>(kStoredShape.hidden) * kStoredShape.inter;
  std::vector<bf16> w13(2 * size), w2(size);
  ASSERT_EQ(layer.w13_bytes(1), w13.size() * sizeof(bf16));
  const ExpertBuffers to{.w13 = w13.data(), .w2 = w2.data()};
  layer.submit_write(2, {&to, 1});
  layer.sync_write();
  for (size_t p = 0; p < 3; ++p) {
    std::vector<float> values(size);
    dequantise(stored.at(2, p).view(), values);
    const bf16* const got = p == 2 ? w2.data() : w13.data() + p * size;
    for (size_t i = 0; i < size; ++i)
      ASSERT_EQ(got[i].bits, to_bf16(values[i]).bits) << kNames[p] << " element " << i;
  }
}

TEST(StoredLoad, Folders) {
  struct Case {
    const char* method;
    std::array<const char*, 3> formats;
    std::array<Store, 3> stores;
    const char* quantization = "null";
  };
  const auto three = [](const auto& one) { return std::array{one, one, one}; };
  const Case cases[] = {
      {"FP8", three("fp8"), three(store_fp8), R"({"quant_method": "fp8", "weight_block_size": [128, 128]})"},
      {"FP8_PERCHANNEL", three("fp8_row"), three(store_fp8_rows)},
      {"MXFP8", three("mxfp8"), three(store_mxfp8)},
      {"MXFP4", three("mxfp4"), three(store_mxfp4)},
      {"RAWINT4", three("int4_g32"), three(store_compressed), R"({"quant_method": "compressed-tensors"})"},
      {"GPTQ_INT4", three("int4_g32_zero"), three(store_gptq),
       R"({"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32})"},
      // what conversions leave when some matrices are named to be kept
      {"RAWINT4",
       {"int4_g32", "bf16", "int4_g32"},
       {store_compressed, store_bf16, store_compressed},
       R"({"quant_method": "compressed-tensors"})"},
      {"BF16",
       {"bf16", "fp8", "bf16"},
       {store_bf16, store_fp8, store_bf16},
       R"({"quant_method": "fp8", "weight_block_size": [128, 128]})"},
  };
  for (const Case& c : cases) {
    const TemporaryFolder folder;
    const StoredExperts experts(c.formats);
    write_folder(experts, c.stores, Json::parse(c.quantization), folder / "model");
    expect_bits(c.method, experts, folder / "model");
  }
}

// Buffers of codes and scales hold gate and up of one format only.
TEST(StoredLoad, NamesFormatsThatBuffersCannotHold) {
  const TemporaryFolder folder;
  const StoredExperts experts({"int4_g32", "int4_g64", "int4_g32"});
  const Store narrow = [](const Matrix& m) {
    std::vector<StoredTensor> tensors = store_compressed(m);
    tensors[1].shape[1] = m.k / 64;
    return tensors;
  };
  write_folder(experts, {store_compressed, narrow, store_compressed},
               Json::parse(R"({"quant_method": "compressed-tensors"})"), folder / "model");
  expect_bits("RAWINT4", experts, folder / "model");
  ExpertLayer layer(
      CpuTeam::shared({.threads = 2}),
      {.layer = kLayer, .shape = kStoredShape, .top_k = 4, .method = "RAWINT4", .weights = folder / "model"});
  layer.load({});
  EXPECT_THAT(error_of([&] { layer.w13_scale_bytes(1); }),
              testing::HasSubstr("RAWINT4 has no buffers for gate as int4_g32 and up as int4_g64"));
}

TEST(StoredLoad, Gguf) {
  const std::map<std::string, BlockWriter> types = {
      {"q4_0", {2, q4_0_blocks}}, {"q8_0", {8, q8_0_blocks}}, {"q6_k", {14, q6_k_blocks}}};
  using Names = std::array<const char*, 3>;
  for (const Names& names :
       {Names{"q4_0", "q4_0", "q4_0"}, Names{"q8_0", "q8_0", "q4_0"}, Names{"q6_k", "q6_k", "q8_0"},
        Names{"q4_0", "q6_k", "q8_0"}, Names{"q8_0", "q4_0", "q4_0"}}) {
    const TemporaryFolder folder;
    const StoredExperts experts(names);
    write_gguf(experts, {types.at(names[0]), types.at(names[1]), types.at(names[2])}, folder / "model.gguf");
    expect_bits("LLAMAFILE", experts, folder / "model.gguf");
    expect_bf16_back(experts, folder / "model.gguf");
  }
}

}  // namespace
}  // namespace kt::inline hybrid
