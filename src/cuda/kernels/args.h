// What GPU kernels take: one struct each, of numbers and addresses in device memory. Plain, because the host that
// fills it and the kernel that reads it are compiled by two compilers.
#pragma once
#include <cstdint>

namespace kt::inline cuda {

// Rows of a matrix in the packed order of formats/layout.h, with what its kernel does not know from its name.
struct PackedRows {
  const uint8_t* blocks = nullptr;
  int64_t block_bytes = 0;
  int n = 0, k = 0, k_pad = 0;
  int span = 0, record_k = 0, header_bytes = 0;
  int bias = 0;                                          // of the format
  int flip = 0;                                          // bits of every stored byte that are turned around
  int scale = 0, min = 0;                                // Scale, Min
  int supers = 0, super_mins = 0, scales = 0, mins = 0;  // in a header
  uint32_t record_divisor = 0,
           span_divisor = 0;  // divisor_of() the chunks of a record, of a span that has some
};

// For x / by as x * divisor_of(by) >> 31, exact where x * by < 2^31.
constexpr uint32_t divisor_of(int by) { return static_cast<uint32_t>((int64_t{1} << 31) / by + 1); }

// y[m, n] = (x[m, k] W^T + bias) * factors. Strides are in floats.
struct ProductArgs {
  PackedRows weights;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;     // [n]; null: none
  const float* factors = nullptr;  // [m]; null: none
  int m = 0;
  int64_t slot_bytes = 0;  // from one expert's weights to the next; their biases stand one behind the other
  const uint16_t* rounded =
      nullptr;  // x in bf16, [rows of whole tiles, k_pad], zeros behind k: for many rows
};

// Rows of x, as many as a tile at most, and the copy of an expert that they are multiplied with.
struct RowTile {
  int32_t slot, first, rows;
};
struct FoundPairs {
  int32_t pairs, tiles;
};

// Products of the same number of rows with matrices of one code, in one launch: blocks from `first` on are a matrix's.
inline constexpr int kMostTogether = 4;
struct ProductsArgs {
  ProductArgs of[kMostTogether];
  int first[kMostTogether] = {};
  int count = 0;
  // Of many rows, by expert; null: one matrix for all rows.
  const RowTile* tiles = nullptr;
  const FoundPairs* found = nullptr;
};
inline constexpr int kProductThreads = 256;
inline constexpr int kFewThreads = 256;
// For many rows: of x and of the matrix in a block.
inline constexpr int kManyThreads = 128, kTileRows = 128, kTileColumns = 128;

// to[i] = from[i] in bf16, with zeros from `width` to to_width, a multiple of 8, and in all rows from `rows` on. With
// an order of pairs to[i] = from[order[i] / top_k], and zeros in the rows that a last tile has too many.
struct RoundRowsArgs {
  const float* from = nullptr;
  int64_t from_stride = 0;
  uint16_t* to = nullptr;
  int width = 0, to_width = 0, rows = 0;
  const int32_t* order = nullptr;  // null: none
  const FoundPairs* found = nullptr;
  int top_k = 1;
};

// Between the GPU and the host's experts. The first words of a step's tables say which step it is and how many of its
// rows are tokens; rows behind them are nobody's.
struct StepWords {
  uint32_t number = 0;
  int32_t tokens = 0;
};
// What either side says when layer `layer` of a step is ready for the other.
inline constexpr uint32_t kLayerBits = 12, kGiveUp = 0xFFFFFFFFu;
inline constexpr int kEndOfStep = (1 << kLayerBits) - 3;                 // above all layers
inline constexpr uint32_t kStepNumbers = (1u << (32 - kLayerBits)) - 1;  // below it
constexpr uint32_t exchange_word(uint32_t number, int layer) {
  return number << kLayerBits | static_cast<uint32_t>(layer + 1);
}

// Rows for the host's experts to page-locked memory, then the word. Pairs of hot experts are not theirs; where no pair
// is left for them the word is not set.
struct PostRowsArgs {
  const StepWords* step = nullptr;
  int layer = 0;
  const float* x = nullptr;
  const int32_t* ids = nullptr;  // [tokens, top_k]
  const float* weights = nullptr;
  const int32_t* slots = nullptr;  // [experts], not negative: hot; null: none is
  int64_t x_stride = 0;
  int width = 0, top_k = 0;
  int always = 0;         // the word is set in any case
  float* to_x = nullptr;  // page-locked
  int32_t* to_ids = nullptr;
  float* to_weights = nullptr;
  uint32_t* posted = nullptr;
  uint32_t* arrived = nullptr;  // two words of the device, 0 before and after: blocks, and pairs for the host
  uint32_t* cold = nullptr;     // of the device: pairs that the host was asked for
};

struct EndStepArgs {
  const StepWords* step = nullptr;
  uint32_t* posted = nullptr;
};

// What they gave, [tokens, width] of page-locked memory, once the host says so.
struct FetchedRows {
  const StepWords* step = nullptr;  // null: nothing is fetched
  const uint32_t* done = nullptr;   // page-locked
  const uint32_t* cold = nullptr;   // 0: nothing was asked
  const float* rows = nullptr;
  uint64_t* waited = nullptr;  // nanoseconds of all fetches so far, on the device, where they are added up
  uint64_t* told = nullptr;    // the same in page-locked memory
  int layer = 0;
};

struct Addend {
  const float* rows = nullptr;  // null: none
  int64_t stride = 0;
  float scale = 1;
};

// x += fetched, x += each addend in turn. out = x / sqrt(mean(x^2) + eps) * weight; null out: the sum only.
struct NormArgs {
  float* x = nullptr;
  FetchedRows fetched = {};
  Addend add[2] = {};
  const float* weight = nullptr;
  float* out = nullptr;
  int64_t x_stride = 0, out_stride = 0;
  int width = 0;
  int fresh = 0;  // x is 0 at first
  float eps = 0;
};

struct SigmoidArgs {
  float* x = nullptr;
  int64_t count = 0;
};

struct CopyHeadsArgs {
  const float* from = nullptr;
  float* to = nullptr;
  int64_t from_width = 0, to_width = 0;    // of rows
  int64_t from_stride = 0, to_stride = 0;  // of heads
  int heads = 0, count = 0;
};

// to[i] = from[rows[i]]
struct PickArgs {
  const float* from = nullptr;
  float* to = nullptr;
  const int32_t* rows = nullptr;
  int64_t width = 0;
};

// Activation of kernels/table.h in plain numbers.
struct GateSpec {
  int kind = 0;
  float limit = 0, alpha = 0;
};

// mid[i] = f(gate[i], up[i]), the functions of kernels/table.h
struct GateArgs {
  const float* gate = nullptr;
  const float* up = nullptr;
  float* mid = nullptr;
  int64_t count = 0;
  int kind = 0;
  float limit = 0, alpha = 0;
};

// Where the tokens of a step stand: [rows] each.
struct TokenPlaces {
  const StepWords* step = nullptr;  // null: all rows are tokens
  const int32_t* positions = nullptr;
  const int32_t* first_pages = nullptr;  // of the token's sequence in `pages`
  const int32_t* pages = nullptr;
};

// Heads of rows: normed, rotated, grown, in place.
struct RotateRowsArgs {
  float* x = nullptr;
  int64_t width = 0;  // of rows
  int heads = 0;
  int64_t stride = 0;  // of heads
  int rotated = 0;
  const float* norm = nullptr;  // null: none
  int norms = 0, norm_size = 0;
  float eps = 0;
  int half = 0, interleaved = 0;
  const float* cosines = nullptr;  // [tokens, half]
  const float* sines = nullptr;
  const float* growth = nullptr;  // [tokens]; null: none
};

// A plane of the cache. A page holds blocks of keys of all heads, then of values unless they are shared; a block is
// [64 tokens, columns], then a scale for each token where numbers are int8.
struct CachePlane {
  uint8_t* memory = nullptr;
  int64_t page_bytes = 0, key_bytes = 0, value_bytes = 0;  // of a page, of a head's blocks
  int heads = 0, d = 0, dv = 0, d_pad = 0, dv_pad = 0;
  int shared = 0, type = 0;  // KvType
};

struct WriteCacheArgs {
  CachePlane plane;
  TokenPlaces places;
  const float* k = nullptr;
  const float* v = nullptr;  // null where they are shared
  int64_t k_width = 0, v_width = 0;
};

// Queries and keys of heads, then the cache.
struct FinishHeadsArgs {
  RotateRowsArgs q, k;
  WriteCacheArgs write;
};

struct AttendRowsArgs {
  CachePlane plane;
  TokenPlaces places;
  const float* q = nullptr;
  float* out = nullptr;
  const float* sinks = nullptr;  // [heads]; null: none
  int64_t q_width = 0, out_width = 0;
  int heads = 0, window = 0;
  float scale = 1;
  // Not 0: as many blocks for each row and its heads, a group of pages each, and what they give for kt_attend_join.
  int groups = 0;
  float* parts = nullptr;  // [tokens, heads, groups, dv + 2]
};
inline constexpr int kAttendThreads = 128;
// Heads of a block, which read the same keys: where values have at most kAttendThreads columns, and where more.
inline constexpr int kAttendHeads = 8, kAttendWideHeads = 4;
inline constexpr int kAttendGroups = 64;  // of a row's pages at most

// On matrix units, operands in bf16.
struct AttendMatrixArgs {
  // Here groups are 1 or more. Of more, blocks write parts [tokens, heads, groups, dv_pad] and stats [tokens, heads,
  // groups, 2] for kt_attend_sum; of one, what a row gets.
  AttendRowsArgs rows;
  int first = 0;  // of the step's rows
  int whole = 0;  // all pages that a row sees are one group
  int count = 0,
      tiles = 0;  // kt_attend_many: rows of one sequence, and of them so many times what a block takes
  float* stats = nullptr;
};
// Rows of a block, which read the same keys: of heads with keys and values of their own, and of those that share them.
inline constexpr int kFewHeads = 16, kLatentHeads = 32;
inline constexpr int kAttendManyRows = 64;                              // tokens times heads
inline constexpr int kFewColumns = 128, kFewWideColumns = 256;          // of keys and of values, padded
inline constexpr int kLatentColumns = 576, kLatentValues = 512;         // at most
inline constexpr int kAttendSumThreads = 256, kAttendSumColumns = 128;  // of a block

// RouterSpec of nn/router.h in plain numbers.
struct RouteArgs {
  const float* scores = nullptr;      // [tokens, experts], stride `width`
  const float* correction = nullptr;  // [experts]; null: none
  int32_t* ids = nullptr;             // [tokens, top_k]
  float* weights = nullptr;
  int64_t width = 0;
  int experts = 0, top_k = 0;
  int sigmoid = 0, softmax_of_chosen = 0, normalise = 0;
  int groups = 1, top_groups = 1, group_top_two = 0;
  float normalise_floor = 0, normalise_least = 0, scale = 1;
  const StepWords* step = nullptr;  // rows that are nobody's get ids of -1
  // ChooseExperts::forced, and where the tokens stand; null: none.
  const float* forced = nullptr;
  int forced_rounds = 0;
  const int32_t* positions = nullptr;
};

// Which copy of an expert the pairs of a step go to: pair p is token p / top_k. Read by kernels alone; the same
// launches serve any choice.
struct ChosenExperts {
  const int32_t* ids = nullptr;    // [tokens, top_k]; none of the layer's: no pair
  const int32_t* slots = nullptr;  // [experts], of the copy; negative: there is none here
  int experts = 0, top_k = 0;
};

// mid[pair] = f(gate(x[token]), up(x[token])) of one node's piece of the experts. Gate and up of one format in one
// launch; of two formats gate first, whose sums wait in mid, then up.
struct ExpertsInArgs {
  ChosenExperts chosen;
  enum : int { kBoth, kGate, kUp };
  int part = kBoth;
  PackedRows weights;      // of slot 0: gate's where both, whose blocks stand `up_bytes` before up's
  int64_t slot_bytes = 0;  // from one copy to the next
  int64_t up_bytes = 0;
  const float* gate_bias = nullptr;  // [slots, width]; null: none
  const float* up_bias = nullptr;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* mid = nullptr;  // [pairs, width]
  int64_t width = 0;
  GateSpec gate;
};

// out[token] = sum over its pairs of weight * down(mid[pair]), with `add` to what is there.
struct ExpertsOutArgs {
  ChosenExperts chosen;
  PackedRows weights;
  int64_t slot_bytes = 0;
  const float* bias = nullptr;          // [slots, n]; null: none
  const float* pair_weights = nullptr;  // [tokens, top_k]
  const float* mid = nullptr;
  int64_t width = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  int add = 0;
};

struct MatrixPeakArgs {
  float* out = nullptr;  // [blocks, threads]
  int rounds = 0;
};

// Pairs that have a copy, in the order of the copies: order[places[pair]] = pair, and -1 for the others; tiles of them.
struct GroupPairsArgs {
  ChosenExperts chosen;
  int pairs = 0;
  int32_t* places = nullptr;  // [pairs]
  int32_t* order = nullptr;   // [pairs]
  RowTile* tiles = nullptr;   // [pairs / kTileRows + copies]
  FoundPairs* found = nullptr;
};

// to[i] = f(gate[i], up[i]) in bf16, of the pairs that were found; rows of `width` and to_width.
struct GatePairsArgs {
  const float* gate = nullptr;
  const float* up = nullptr;
  uint16_t* to = nullptr;
  int width = 0, to_width = 0;
  const FoundPairs* found = nullptr;
  GateSpec how;
};

// out[token] = sum over its pairs of weights * rows[place], with `add` to what is there.
struct SumPairsArgs {
  const float* rows = nullptr;  // [pairs, width]
  const int32_t* places = nullptr;
  const float* weights = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
  int width = 0, top_k = 0, add = 0;
};

inline constexpr int kMostRouted = 1024;  // experts a router chooses from
inline constexpr int kMostChosen = 64;    // of them for a token
inline constexpr int kMostColumns = 640;  // of a head's keys or values

}  // namespace kt::inline cuda
