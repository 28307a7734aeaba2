// Products with packed weights in f32: y = x W^T. A kernel for each code, width of a packed step and number of rows;
// scales and mins are read as the header of each record says. nvcc compiles one code and step at a time (KT_CODE,
// KT_STEP), so that a model loads what it uses.
//
// A block takes 16 rows of the matrix; 16 neighbouring lanes are those rows and read neighbouring bytes, each from chunks of 64
// columns at fixed places. A result depends neither on the other rows of the call nor on how many there are.
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"
#include "formats/layout.h"

namespace kt {

KT_GPU float e4m3_value(uint32_t code) {
  const uint32_t sign = (code & 0x80) << 24, rest = code & 0x7F;
  if (rest == 0x7F) return gpu::float_of(0x7FC00000u);
  return gpu::float_of(sign | gpu::bits_of(gpu::float_of(rest << 20) * 0x1p120f));
}
KT_GPU float e2m1_value(uint32_t code) {
  return gpu::float_of((code & 8) << 28 | gpu::bits_of(gpu::float_of((code & 7) << 22) * 0x1p126f));
}
KT_GPU float e8m0_value(uint32_t code) {
  if (code == 255) return gpu::float_of(0x7FC00000u);
  return code == 0 ? 0x1p-127f : gpu::float_of(code << 23);
}

// 8 entries of the table of kIq4 codes in a word.
constexpr uint64_t iq4_word(int first) {
  uint64_t word = 0;
  for (int i = 7; i >= 0; --i) word = word << 8 | static_cast<uint8_t>(kIq4Values[static_cast<size_t>(first + i)]);
  return word;
}

template <Code kCode>
KT_GPU float code_number(uint32_t code) {
  // 2^23 + code, exactly: cheaper than a conversion.
  constexpr bool kUnsigned = kCode == Code::kU2 || kCode == Code::kU3 || kCode == Code::kU4 || kCode == Code::kU5 ||
                             kCode == Code::kU6;
  if constexpr (kUnsigned) return gpu::float_of(0x4B000000u | code) - 0x1p23f;
  if constexpr (kCode == Code::kI8) return static_cast<float>(static_cast<int8_t>(code));
  if constexpr (kCode == Code::kIq4) {
    constexpr uint64_t kLow = iq4_word(0), kHigh = iq4_word(8);
    return static_cast<float>(static_cast<int8_t>((code & 8 ? kHigh : kLow) >> (code & 7) * 8));
  }
  if constexpr (kCode == Code::kE2m1) return e2m1_value(code);
  if constexpr (kCode == Code::kE4m3) return e4m3_value(code);
  if constexpr (kCode == Code::kBf16) return gpu::from_bf16(static_cast<uint16_t>(code));
  if constexpr (kCode == Code::kF16) return gpu::from_f16(static_cast<uint16_t>(code));
  if constexpr (kCode == Code::kF32) return gpu::float_of(code);
  return static_cast<float>(code);
}

KT_GPU uint16_t half_at(const uint8_t* from) { return *reinterpret_cast<const uint16_t*>(from); }

// What governs 16 columns of a row: value = (code - offset) * scale - min.
struct RowFactors {
  float offset, scale, min;
};

KT_GPU RowFactors factors_at(const PackedRows& w, const uint8_t* header, int in_record, int row) {
  const int at = in_record / w.span * kBlockRows + row;
  RowFactors f{static_cast<float>(w.bias), 1.0f, 0.0f};
  switch (static_cast<Scale>(w.scale)) {
    case Scale::kNone:
      break;
    case Scale::kF32:
      f.scale = *reinterpret_cast<const float*>(header + w.scales + at * 4);
      break;
    case Scale::kBf16:
      f.scale = gpu::from_bf16(half_at(header + w.scales + at * 2));
      break;
    case Scale::kF16:
      f.scale = gpu::from_f16(half_at(header + w.scales + at * 2));
      break;
    case Scale::kE8m0:
      f.scale = e8m0_value(header[w.scales + at]);
      break;
    case Scale::kS8F16:
      f.scale = static_cast<float>(static_cast<int8_t>(header[w.scales + at])) *
                gpu::from_f16(half_at(header + w.supers + row * 2));
      break;
  }
  switch (static_cast<Min>(w.min)) {
    case Min::kNone:
      break;
    case Min::kZero:
      f.offset += static_cast<float>(header[w.mins + at]);
      break;
    case Min::kF16:
      f.min = gpu::from_f16(half_at(header + w.mins + at * 2));
      break;
    case Min::kS8F16:
      f.min = static_cast<float>(static_cast<int8_t>(header[w.mins + at])) *
              gpu::from_f16(half_at(header + w.super_mins + row * 2));
      break;
  }
  return f;
}

// A plane of sub-byte codes of one row: 4 bytes with columns [k, k + 4) of a chunk, k a multiple of 4, each in the low
// bits of its byte.
template <int kBits, int kStep>
KT_GPU uint32_t plane_at(const uint8_t* plane, int row, int k) {
  constexpr int kSharing = 8 / kBits;
  const int step = k / kStep;
  const uint8_t* const at = plane + (step / kSharing * kBlockRows + row) * kStep + k % kStep;
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
  return *reinterpret_cast<const uint32_t*>(at) >> step % kSharing * kBits & kMask;
}

// Codes of row `row`, columns [k, k + 4) of a chunk, k a multiple of 4.
struct FourCodes {
  uint32_t code[4];
};

template <Code kCode, int kStep>
KT_GPU FourCodes codes_at(const uint8_t* chunk, int row, int k) {
  constexpr Planes kPlanes = planes(kCode);
  constexpr int kColumns = step_columns(kCode, kStep), kBytes = step_bytes(kCode, kStep);
  FourCodes out;
  if constexpr (kPlanes.low == 4 && kColumns == 1) {
    for (int i = 0; i < 4; ++i) out.code[i] = chunk[(k + i) / 2 * kBlockRows + row] >> (k + i) % 2 * 4 & 15;
  } else if constexpr (kPlanes.low > 0) {
    uint32_t bytes = plane_at<kPlanes.low, kStep>(chunk, row, k);
    if constexpr (kPlanes.high > 0)
      bytes |= plane_at<kPlanes.high, kStep>(chunk + low_plane_bytes(kCode), row, k) << kPlanes.low;
    for (int i = 0; i < 4; ++i) out.code[i] = bytes >> 8 * i & 0xFF;
  } else if constexpr (kColumns % 4 == 0 && packed_code_bytes(kCode) == 1 && !in_pairs(kCode, kStep)) {
    const uint32_t bytes =
        *reinterpret_cast<const uint32_t*>(chunk + (k / kColumns * kBlockRows + row) * kBytes + k % kColumns);
    for (int i = 0; i < 4; ++i) out.code[i] = bytes >> 8 * i & 0xFF;
  } else if constexpr (kCode == Code::kBf16) {
    for (int i = 0; i < 4; i += 2) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(
          chunk + ((k + i) / kColumns * kBlockRows + row) * kBytes + (k + i) % kColumns * 2);
      out.code[i] = pair & 0xFFFF;
      out.code[i + 1] = pair >> 16;
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      const uint8_t* const at = chunk + (k + i) / kColumns * kBlockRows * kBytes + row_byte(kCode, kStep, row) +
                                column_byte(kCode, kStep, (k + i) % kColumns);
      if constexpr (packed_code_bytes(kCode) == 4)
        out.code[i] = *reinterpret_cast<const uint32_t*>(at);
      else if constexpr (packed_code_bytes(kCode) == 2)
        out.code[i] = half_at(at);
      else
        out.code[i] = *at;
    }
  }
  return out;
}

// Four columns of x from k on.
struct FourNumbers {
  float x[4];
};
KT_GPU FourNumbers numbers_at(const float* x, bool aligned) {
  if (!aligned) return {{x[0], x[1], x[2], x[3]}};
  const gpu::Words words = gpu::load16(x);
  return {{gpu::float_of(words.word[0]), gpu::float_of(words.word[1]), gpu::float_of(words.word[2]),
           gpu::float_of(words.word[3])}};
}

// The rows of x that a block multiplies.
struct InputRows {
  const float* x;
  int64_t stride;
  int rows;
  bool aligned;  // to 16 bytes, all of them
};

template <Code kCode>
KT_GPU float weight_of(const PackedRows& w, uint32_t code, const RowFactors& f) {
  return (code_number<kCode>(code ^ static_cast<uint32_t>(w.flip)) - f.offset) * f.scale - f.min;
}

// A whole chunk of one row of the matrix.
template <Code kCode, int kStep, int kRows>
KT_GPU void add_chunk(const PackedRows& w, const uint8_t* header, int in_record, int row, int k0, const InputRows& in,
                      float* sums) {
  const uint8_t* const chunk = header + w.header_bytes + in_record / kChunk * chunk_bytes(kCode);
  KT_UNROLL(kRows == 1 ? 4 : 1)
  for (int part = 0; part < kChunk; part += 16) {
    const RowFactors f = factors_at(w, header, in_record + part, row);
    KT_UNROLL(4)
    for (int i = part; i < part + 16; i += 4) {
      const FourCodes codes = codes_at<kCode, kStep>(chunk, row, i);
      float values[4];
      for (int c = 0; c < 4; ++c) values[c] = weight_of<kCode>(w, codes.code[c], f);
      for (int r = 0; r < kRows; ++r) {
        if (r >= in.rows) break;
        const FourNumbers x = numbers_at(in.x + r * in.stride + k0 + i, in.aligned);
        for (int c = 0; c < 4; ++c) sums[r] = gpu::fma(x.x[c], values[c], sums[r]);
      }
    }
  }
}

// What is left of the columns behind the last whole chunk: the padding's codes meet no number of x.
template <Code kCode, int kStep, int kRows>
KT_GPU void add_tail(const PackedRows& w, const uint8_t* header, int in_record, int row, int k0, const InputRows& in,
                     float* sums) {
  const uint8_t* const chunk = header + w.header_bytes + in_record / kChunk * chunk_bytes(kCode);
  KT_UNROLL(1)
  for (int k = 0; k0 + k < w.k; ++k) {
    const RowFactors f = factors_at(w, header, in_record + k, row);
    const FourCodes codes = codes_at<kCode, kStep>(chunk, row, k / 4 * 4);
    uint32_t code = 0;
    for (int c = 0; c < 4; ++c) code = c == k % 4 ? codes.code[c] : code;
    const float value = weight_of<kCode>(w, code, f);
    for (int r = 0; r < kRows; ++r)
      if (r < in.rows) sums[r] = gpu::fma(in.x[r * in.stride + k0 + k], value, sums[r]);
  }
}

constexpr int kSlices = 16;  // of a row's columns: two for each of 8 warps

// Blocks of 8 warps, [row blocks, rows / kRows]: lane l of warp w is row l % 16 of the block and takes chunks w * 2 + l / 16
// and every 16th behind it; slices are added in order.
template <Code kCode, int kStep, int kRows>
KT_GPU void product(const ProductArgs& args, float* slices) {
  const PackedRows& w = args.weights;
  const int row = gpu::thread() % kBlockRows, slice = gpu::thread() / kBlockRows;
  const int first = gpu::block_y() * kRows, rows = args.m - first < kRows ? args.m - first : kRows;
  const uint8_t* const stored = w.blocks + gpu::block() * w.block_bytes;
  const InputRows in{args.x + first * args.x_stride, args.x_stride, rows,
                     (reinterpret_cast<uintptr_t>(args.x) | static_cast<uintptr_t>(args.x_stride * 4)) % 16 == 0};
  float sums[kRows] = {};
  for (int k0 = slice * kChunk; k0 < w.k; k0 += kSlices * kChunk) {
    const int record = k0 / w.record_k, in_record = k0 - record * w.record_k;
    const uint8_t* const header =
        stored + record * (int64_t{w.header_bytes} + w.record_k / kChunk * chunk_bytes(kCode));
    if (k0 + kChunk <= w.k)
      add_chunk<kCode, kStep, kRows>(w, header, in_record, row, k0, in, sums);
    else
      add_tail<kCode, kStep, kRows>(w, header, in_record, row, k0, in, sums);
  }
  for (int r = 0; r < kRows; ++r) slices[(slice * kRows + r) * kBlockRows + row] = sums[r];
  gpu::barrier();
  for (int i = gpu::thread(); i < rows * kBlockRows; i += gpu::threads()) {
    const int r = i / kBlockRows, column = gpu::block() * kBlockRows + i % kBlockRows;
    if (column >= w.n) continue;
    float sum = 0;
    for (int s = 0; s < kSlices; ++s) sum += slices[(s * kRows + r) * kBlockRows + i % kBlockRows];
    if (args.bias) sum += args.bias[column];
    if (args.factors) sum *= args.factors[first + r];
    args.y[(first + r) * args.y_stride + column] = sum;
  }
}

// kt_product_u4_4_1: codes u4, steps of 4 bytes, one row.
#define KT_PRODUCT(name, code, step)                                    \
  KT_KERNEL(kt_product_##name##_##step##_1, ProductArgs, args, 256) {   \
    KT_SHARED(float, slices, kSlices * kBlockRows);                     \
    product<Code::code, step, 1>(args, slices);                         \
  }                                                                     \
  KT_KERNEL(kt_product_##name##_##step##_8, ProductArgs, args, 256) {   \
    KT_SHARED(float, slices, kSlices * kBlockRows * 8);                 \
    product<Code::code, step, 8>(args, slices);                         \
  }

#ifdef KT_CODE_NAME
#define KT_ONE(name, code, step) KT_PRODUCT(name, code, step)
KT_ONE(KT_CODE_NAME, KT_CODE, KT_STEP)
#else
#define KT_BOTH(name, code) KT_PRODUCT(name, code, 4) KT_PRODUCT(name, code, 8)
KT_BOTH(i8, kI8)
KT_BOTH(u2, kU2)
KT_BOTH(u3, kU3)
KT_BOTH(u4, kU4)
KT_BOTH(u5, kU5)
KT_BOTH(u6, kU6)
KT_BOTH(iq4, kIq4)
KT_BOTH(e2m1, kE2m1)
KT_BOTH(e4m3, kE4m3)
KT_BOTH(bf16, kBf16)
KT_BOTH(f16, kF16)
KT_BOTH(f32, kF32)
#endif

}  // namespace kt
