#include "engine/sequence_store.h"
#include "engine/testing/counted_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>

#include "base/error.h"

namespace kt::inline engine {
namespace {

void fill(StoredSequence& sequence, const Tokens& tokens) {
  ASSERT_TRUE(sequence.reserve(static_cast<int>(tokens.size())));
  sequence.commit(std::span(tokens).subspan(static_cast<size_t>(sequence.tokens())));
}

TEST(SequenceStore, ReusesFullPagesOnly) {
  SequenceStore store({.pages = 10});
  const Tokens tokens = counted(200);
  {
    StoredSequence first = store.start(tokens);
    EXPECT_EQ(first.tokens(), 0);
    fill(first, tokens);
    EXPECT_EQ(store.pages_held(), 4);
    StoredSequence second = store.start(tokens);  // while the first runs
    EXPECT_EQ(second.tokens(), 192);
    EXPECT_TRUE(std::ranges::equal(second.pages(), first.pages().first(3)));
    EXPECT_EQ(store.pages_held(), 4);
  }
  EXPECT_EQ(store.pages_held(), 0);
  EXPECT_EQ(store.pages_cached(), 3);
  EXPECT_EQ(store.start(tokens).tokens(), 192);
  // One token has to run.
  EXPECT_EQ(store.start(std::span(tokens).first(192)).tokens(), 128);
  EXPECT_EQ(store.start(std::span(tokens).first(193)).tokens(), 192);
  EXPECT_EQ(store.start(std::span(tokens).first(64)).tokens(), 0);
  EXPECT_EQ(store.start({}).tokens(), 0);
  // The same tokens behind another beginning are another page.
  Tokens other = tokens;
  other[0] = 7;
  EXPECT_EQ(store.start(other).tokens(), 0);
  store.drop_cached();
  EXPECT_EQ(store.pages_cached(), 0);
  EXPECT_EQ(store.start(tokens).tokens(), 0);
}

TEST(SequenceStore, OldestLeavesFirstAndBeginningsLast) {
  SequenceStore store({.pages = 6});
  const Tokens a = counted(192), b = counted(192, 1000);
  for (const Tokens& tokens : {a, b}) {
    StoredSequence sequence = store.start(tokens);
    fill(sequence, tokens);
  }
  EXPECT_EQ(store.pages_cached(), 6);
  {
    StoredSequence touched = store.start(counted(193));
  }  // a is used later than b now
  StoredSequence other = store.start(counted(1, 5000));
  ASSERT_TRUE(other.reserve(130));  // 3 pages: all of b
  EXPECT_EQ(store.start(counted(193)).tokens(), 192);
  EXPECT_EQ(store.start(counted(193, 1000)).tokens(), 0);
  ASSERT_TRUE(other.reserve(4 * 64));
  EXPECT_EQ(store.start(counted(193)).tokens(), 128);
}

TEST(SequenceStore, RefusalChangesNothing) {
  SequenceStore store({.pages = 4});
  StoredSequence a = store.start({});
  ASSERT_TRUE(a.reserve(128));
  StoredSequence b = store.start({});
  EXPECT_FALSE(b.reserve(193));
  EXPECT_EQ(store.pages_held(), 2);
  EXPECT_TRUE(b.reserve(128));
  EXPECT_EQ(store.pages_available(), 0);
  EXPECT_TRUE(b.reserve(128));
  EXPECT_FALSE(a.reserve(129));
  EXPECT_THROW(a.commit(counted(129)), Error);
  EXPECT_THROW(SequenceStore({.pages = 0}), Error);
}

TEST(SequenceStore, ForkSharesFullPages) {
  SequenceStore store({.pages = 4});
  const Tokens tokens = counted(100);
  StoredSequence parent = store.start(tokens);
  fill(parent, tokens);
  StoredSequence child = parent.fork();
  EXPECT_EQ(child.tokens(), 64);
  EXPECT_EQ(child.pages()[0], parent.pages()[0]);
  fill(child, tokens);
  EXPECT_NE(child.pages()[1], parent.pages()[1]);
  EXPECT_EQ(store.pages_held(), 3);
  parent.release();
  EXPECT_EQ(store.pages_held(), 2);
}

// Two that fill an equal page at once end up with one.
TEST(SequenceStore, EqualPagesBecomeOne) {
  SequenceStore store({.pages = 4});
  const Tokens tokens = counted(64);
  StoredSequence a = store.start(tokens), b = store.start(tokens);
  fill(a, tokens);
  fill(b, tokens);
  EXPECT_EQ(a.pages()[0], b.pages()[0]);
  EXPECT_EQ(store.pages_held(), 1);
}

// The same rules over whole beginnings in a map, by search.
class NaivePages {
 public:
  explicit NaivePages(int pages) : pages_(pages) {}
  int held() const { return plain_ + static_cast<int>(std::ranges::count_if(full_, is_held)); }
  int cached() const { return plain_ + static_cast<int>(full_.size()) - held(); }

  struct Sequence {
    Tokens tokens;
    int pages = 0;  // full ones among them
  };
  Sequence start(const Tokens& tokens) {
    Sequence sequence;
    for (size_t end = 64; end < tokens.size(); end += 64) {
      const Tokens beginning(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(end));
      const auto found = full_.find(beginning);
      if (found == full_.end()) break;
      ++found->second.holders;
      sequence = {beginning, static_cast<int>(end / 64)};
    }
    return sequence;
  }
  bool reserve(Sequence& sequence, int tokens) {
    const int wanted = (tokens + 63) / 64 - sequence.pages;
    if (wanted <= 0) return true;
    if (wanted > pages_ - held()) return false;
    for (int i = 0; i < wanted; ++i) {
      if (static_cast<int>(full_.size()) + plain_ == pages_) evict();
      ++plain_;
      ++sequence.pages;
    }
    return true;
  }
  void commit(Sequence& sequence, std::span<const TokenId> tokens) {
    for (TokenId id : tokens) {
      sequence.tokens.push_back(id);
      if (sequence.tokens.size() % 64 != 0) continue;
      --plain_;
      ++full_[sequence.tokens].holders;
    }
  }
  Sequence fork(const Sequence& sequence) {
    Tokens full = sequence.tokens;
    full.resize(full.size() / 64 * 64 + 1);
    return start(full);
  }
  void release(Sequence& sequence) {
    const auto full = static_cast<int>(sequence.tokens.size() / 64);
    plain_ -= sequence.pages - full;
    for (int page = full; page > 0; --page) {
      sequence.tokens.resize(static_cast<size_t>(page) * 64);
      Entry& entry = full_.at(sequence.tokens);
      if (--entry.holders == 0) entry.stamp = ++stamps_;
    }
    sequence = {};
  }

 private:
  struct Entry {
    int holders = 0, stamp = 0;
  };
  static bool is_held(const std::pair<const Tokens, Entry>& item) { return item.second.holders > 0; }
  void evict() {
    auto oldest = full_.end();
    for (auto it = full_.begin(); it != full_.end(); ++it)
      if (!is_held(*it) && (oldest == full_.end() || it->second.stamp < oldest->second.stamp)) oldest = it;
    ASSERT_NE(oldest, full_.end());
    full_.erase(oldest);
  }
  int pages_, plain_ = 0, stamps_ = 0;
  std::map<Tokens, Entry> full_;
};

struct Pair {
  Tokens tokens;
  StoredSequence real;
  NaivePages::Sequence naive;
};

void check_against_naive(int page_count, int buckets, uint32_t seed) {
  std::mt19937 rng(seed);
  SequenceStore store({.pages = page_count, .buckets = buckets});
  NaivePages naive(page_count);
  std::list<Pair> live;
  // What the keys and values would be: for each place, the sequence up to it.
  std::vector<uint64_t> memory(static_cast<size_t>(page_count) * 64);
  const auto place = [](const StoredSequence& sequence, size_t i) {
    return static_cast<size_t>(sequence.pages()[i / 64]) * 64 + i % 64;
  };
  const auto digest = [](uint64_t before, TokenId id) { return (before + id + 1) * 0x9E3779B97F4A7C15u; };
  // Few first tokens and long runs of equal ones, so that beginnings are shared often.
  const auto grow = [&](Tokens& tokens, size_t count) {
    for (; count > 0; --count) tokens.push_back(rng() % 100 == 0 ? static_cast<TokenId>(rng() % 3) : 0);
  };
  int reused = 0, refused = 0;
  for (int step = 0; step < 6000; ++step) {
    const uint32_t action = rng() % 8;
    if (live.empty() || action < 2) {
      Tokens tokens;
      grow(tokens, rng() % 300);
      live.push_back({tokens, store.start(tokens), naive.start(tokens)});
      reused += live.back().real.tokens() > 0;
      live.back().tokens.resize(static_cast<size_t>(live.back().real.tokens()));
    } else {
      auto pick = std::next(live.begin(), rng() % live.size());
      if (action < 6) {
        const size_t before = pick->tokens.size();
        Tokens grown = pick->tokens;
        grow(grown, rng() % 150);
        const bool fits = pick->real.reserve(static_cast<int>(grown.size()));
        ASSERT_EQ(fits, naive.reserve(pick->naive, static_cast<int>(grown.size())));
        refused += !fits;
        if (fits) {
          pick->tokens = grown;
          uint64_t value = 0;
          for (size_t i = 0; i < grown.size(); ++i) {
            value = digest(value, grown[i]);
            if (i >= before) memory[place(pick->real, i)] = value;
          }
          pick->real.commit(std::span(grown).subspan(before));
          naive.commit(pick->naive, std::span(grown).subspan(before));
        }
      } else if (action == 6) {
        live.push_back({pick->tokens, pick->real.fork(), naive.fork(pick->naive)});
        live.back().tokens.resize(static_cast<size_t>(live.back().real.tokens()));
      } else {
        naive.release(pick->naive);
        live.erase(pick);
      }
    }
    ASSERT_EQ(store.pages_held(), naive.held()) << "step " << step;
    ASSERT_EQ(store.pages_cached(), naive.cached()) << "step " << step;
    for (const Pair& pair : live) {
      ASSERT_EQ(pair.real.tokens(), static_cast<int>(pair.naive.tokens.size()));
      uint64_t value = 0;
      for (size_t i = 0; i < pair.tokens.size(); ++i) {
        value = digest(value, pair.tokens[i]);
        ASSERT_EQ(memory[place(pair.real, i)], value) << "step " << step;
      }
    }
    if (live.size() > 12) {
      naive.release(live.front().naive);
      live.pop_front();
    }
  }
  EXPECT_GT(reused, 50);
  EXPECT_GT(refused, 0);
  live.clear();
  EXPECT_EQ(store.pages_held(), 0);
}

TEST(SequenceStore, AgreesWithANaiveOne) {
  check_against_naive(40, 0, 1);
  check_against_naive(20, 0, 2);
  check_against_naive(30, 1, 3);  // everything collides: tokens decide, not hashes
}

}  // namespace
}  // namespace kt::inline engine
