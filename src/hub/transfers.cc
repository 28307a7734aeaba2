#include "hub/transfers.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "hub/part_file.h"
#include "text/shown.h"

namespace kt::inline hub {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostFailures = 6, kMostHops = 5;

struct Job {
  TransferJob what;
  std::unique_ptr<PartFile> part;
  std::string location;   // where the hub sent us last; "": ask it
  size_t next = 0;        // pieces before it are there or under way
  int version = 0;        // of the part: answers to an older one are dropped
  int wrong = 0;          // times that the sum was
  bool in_one = false;    // the server has no ranges
  std::string complaint;  // of the sum
};

// A piece under way, or waiting to be asked for again.
struct Fetch {
  Job* job = nullptr;
  size_t piece = 0;
  int version = 0, failures = 0, hops = 0;
  uint64_t received = 0;   // of the piece, on the disk
  uint64_t at_start = 0;   // the same when it was last asked for
  bool no_ranges = false;  // what its answer showed
  std::string misfit;      // of the answer's head
  Clock::time_point due;
};

// Sums whole files while others come.
class Summer {
 public:
  Summer() : thread_([this] { work(); }) {}
  ~Summer() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  void add(Job* job) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(job);
      ++open_;
    }
    wake_.notify_all();
  }
  size_t open() const { return open_; }  // jobs not taken back; for the thread that adds
  // A job whose sum is known, waiting for one as long as told.
  Job* take(std::chrono::milliseconds most) {
    std::unique_lock lock(mutex_);
    done_wake_.wait_for(lock, most, [&] { return !done_.empty(); });
    if (done_.empty()) return nullptr;
    Job* const out = done_.front();
    done_.pop_front();
    --open_;
    return out;
  }

 private:
  void work() {
    while (true) {
      Job* job = nullptr;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
        if (stop_) return;
        job = waiting_.front();
        waiting_.pop_front();
      }
      try {
        job->part->sync();
        job->complaint = wrong_bytes(job->part->path(), job->what.file);
      } catch (const Error& error) {
        job->complaint = error.what();
      }
      const std::lock_guard lock(mutex_);
      done_.push_back(job);
      done_wake_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_wake_;
  std::deque<Job*> waiting_, done_;
  size_t open_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

class Transfers {
 public:
  Transfers(HubClient& client, const RepoListing& listing, Store& store, const DownloadRequest& request,
            std::vector<TransferJob> jobs)
      : client_(client), listing_(listing), store_(store), request_(request), start_(Clock::now()) {
    progress_.files = jobs.size();
    for (TransferJob& job : jobs) {
      progress_.total += job.file.size;
      progress_.bytes += PartFile::bytes_there(store.part_path(job.file), job.file.size, request.piece);
      jobs_.push_back({.what = std::move(job)});
      opening_.push_back(&jobs_.back());
    }
  }

  uint64_t run() {
    while (true) {
      fill();
      const bool network = client_.web().running() > 0;
      if (!network && waiting_.empty() && current_.empty() && summer_.open() == 0) break;
      for (const WebAnswer& answer : client_.web().wait(std::chrono::milliseconds(network ? 100 : 0)))
        take(answer);
      while (Job* job = summer_.take(std::chrono::milliseconds(network ? 0 : 20))) settle(*job);
      report(false);
    }
    report(true);
    return progress_.fetched;
  }

 private:
  // Starts what there is room for: what waited first, then pieces of the files in order.
  void fill() {
    while (client_.web().running() < static_cast<size_t>(request_.connections)) {
      const auto now = Clock::now();
      const auto due = std::ranges::find_if(waiting_, [&](const Fetch& one) { return one.due <= now; });
      if (due != waiting_.end()) {
        Fetch again = std::move(*due);
        waiting_.erase(due);
        start(std::move(again));
        continue;
      }
      if (const std::optional<Fetch> next = next_piece())
        start(*next);
      else
        return;
    }
  }

  std::optional<Fetch> next_piece() {
    while (true) {
      while (!current_.empty()) {
        Job& job = *current_.front();
        while (job.next < job.part->pieces() && job.part->has(job.next)) ++job.next;
        if (job.next < job.part->pieces())
          return Fetch{.job = &job, .piece = job.next++, .version = job.version, .misfit = {}, .due = {}};
        current_.pop_front();
      }
      if (opening_.empty()) return std::nullopt;
      open(*opening_.front());
      opening_.pop_front();
    }
  }

  void open(Job& job) {
    const HubFile& file = job.what.file;
    const uint64_t piece = job.in_one ? std::max<uint64_t>(1, file.size) : request_.piece;
    job.part = std::make_unique<PartFile>(store_.part_path(file), file.size, piece);
    job.next = 0;
    if (job.part->is_whole())
      summer_.add(&job);
    else
      current_.push_back(&job);
  }

  void start(Fetch fetch) {
    Job& job = *fetch.job;
    if (fetch.version != job.version) return;
    fetch.at_start = fetch.received;
    const uint64_t begin = job.part->begin_of(fetch.piece) + fetch.received,
                   end = job.part->end_of(fetch.piece);
    const std::string url =
        job.location.empty() ? client_.file_url(listing_, job.what.file.path) : job.location;
    WebRequest request{.url = url, .fields = client_.fields_for(url), .range = {}, .sink = {}};
    const bool whole = begin == 0 && end == job.part->size();
    if (!whole) request.range = text("{}-{}", begin, end - 1);
    under_way_.push_back(std::move(fetch));
    Fetch* const mine = &under_way_.back();
    request.sink = [this, mine](const WebHead& head, std::span<const std::byte> bytes) {
      return take_bytes(*mine, head, bytes);
    };
    by_id_[client_.web().start(std::move(request))] = std::prev(under_way_.end());
  }

  bool take_bytes(Fetch& fetch, const WebHead& head, std::span<const std::byte> bytes) {
    Job& job = *fetch.job;
    if (fetch.version != job.version) return false;
    const uint64_t begin = job.part->begin_of(fetch.piece) + fetch.received,
                   end = job.part->end_of(fetch.piece);
    if (fetch.received == fetch.at_start) {
      if (head.status == 200 && (begin != 0 || end != job.part->size())) {
        fetch.no_ranges = true;
        return false;
      }
      const std::string range = head.field("content-range"), all = text("/{}", job.part->size());
      if (head.status == 206 && !range.ends_with("/*") &&
          (!range.ends_with(all) || !range.starts_with(text("bytes {}-", begin)))) {
        fetch.misfit = text("expected bytes {}-{} of {}, the server sent '{}'", begin, end - 1,
                            job.part->size(), shown(range));
        return false;
      }
    }
    if (bytes.size() > end - begin) {
      fetch.misfit = text("more bytes came than the {} that were asked for", end - begin);
      return false;
    }
    job.part->write(begin, bytes);
    fetch.received += bytes.size();
    progress_.bytes += bytes.size();
    progress_.fetched += bytes.size();
    return true;
  }

  void take(const WebAnswer& answer) {
    const auto at = by_id_.find(answer.id);
    KT_CHECK(at != by_id_.end());
    Fetch fetch = *at->second;
    under_way_.erase(at->second);
    by_id_.erase(at);
    Job& job = *fetch.job;
    if (fetch.version != job.version) return;
    const int status = answer.head.status;
    if (fetch.no_ranges) return restart(job, true);
    const uint64_t length = job.part->end_of(fetch.piece) - job.part->begin_of(fetch.piece);
    if (answer.problem.empty() && (status == 200 || status == 206) && fetch.received == length) {
      job.part->finish(fetch.piece);
      if (job.part->is_whole()) summer_.add(&job);
      return;
    }
    if (answer.problem.empty() && !answer.redirect.empty() && status / 100 == 3)
      return follow(fetch, answer.redirect);
    std::string reason = !fetch.misfit.empty()     ? fetch.misfit
                         : !answer.problem.empty() ? answer.problem
                         : status == 200 || status == 206
                             ? text("{} of {} bytes came", fetch.received, length)
                             : text("the server answered {}", status);
    // An address that the hub gave out is good for a while only.
    const bool elsewhere = !job.location.empty();
    job.location.clear();
    if (answer.problem.empty() && status >= 400 && !is_passing(status) && !elsewhere)
      client_.refuse(answer.head, listing_.repo, listing_.revision, job.what.file.path);
    // A server that sends other bytes than it was asked for will hardly mend its ways.
    fetch.failures = fetch.received > fetch.at_start
                         ? 1
                         : fetch.failures + (fetch.misfit.empty() && !answer.hopeless ? 1 : 4);
    if (fetch.failures > kMostFailures)
      fail("{}: {}: {}, {} times in a row; what came is kept, and the same command goes on",
           listing_.repo.str(), job.what.file.path, reason, fetch.failures);
    fetch.hops = 0;
    fetch.misfit.clear();
    fetch.due =
        Clock::now() + (fetch.received > fetch.at_start ? std::chrono::milliseconds(0)
                                                        : pause_after(fetch.failures - 1, answer.head));
    waiting_.push_back(std::move(fetch));
  }

  void follow(Fetch& fetch, const std::string& to) {
    Job& job = *fetch.job;
    if (++fetch.hops > kMostHops)
      fail("{}: {}: {} redirects in a row", listing_.repo.str(), job.what.file.path, fetch.hops);
    client_.check_redirect(job.location.empty() ? client_.endpoint() : job.location, to);
    job.location = to;
    fetch.due = {};
    waiting_.push_back(fetch);
  }

  // The file from its first byte.
  void restart(Job& job, bool in_one) {
    ++job.version;
    job.in_one = job.in_one || in_one;
    job.location.clear();
    std::erase(current_, &job);
    std::erase_if(waiting_, [&](const Fetch& one) { return one.job == &job; });
    uint64_t kept = 0;
    for (size_t i = 0; i < job.part->pieces(); ++i)
      if (job.part->has(i)) kept += job.part->end_of(i) - job.part->begin_of(i);
    progress_.bytes -= std::min(progress_.bytes, kept);
    job.part->discard();
    job.part.reset();
    open(job);
  }

  // A file whose sum is known takes its place, or comes once more.
  void settle(Job& job) {
    if (job.complaint.empty()) {
      job.part->forget_map();
      const std::string path = job.part->path();
      job.part.reset();
      store_.place(path, job.what.file, job.what.paths);
      ++progress_.files_done;
      return;
    }
    if (++job.wrong > 1) {
      job.part->discard();
      fail("{}: {}: {}, twice; what the hub sends is not what it lists, or something on the way changes it",
           listing_.repo.str(), job.what.file.path, job.complaint);
    }
    if (request_.note)
      request_.note(text("{}: {}; once more from its first byte", job.what.file.path, job.complaint));
    restart(job, false);
  }

  void report(bool end) {
    if (!request_.progress) return;
    const auto now = Clock::now();
    if (!end && now - reported_ < std::chrono::milliseconds(100)) return;
    reported_ = now;
    progress_.seconds = std::chrono::duration<double>(now - start_).count();
    request_.progress(progress_);
  }

  HubClient& client_;
  const RepoListing& listing_;
  Store& store_;
  const DownloadRequest& request_;
  std::list<Job> jobs_;
  std::deque<Job*> opening_, current_;  // not opened yet; with pieces to ask for
  std::list<Fetch> under_way_;
  std::map<uint64_t, std::list<Fetch>::iterator> by_id_;
  std::vector<Fetch> waiting_;
  DownloadProgress progress_;
  Clock::time_point start_, reported_;
  Summer summer_;  // last: its thread ends before what it looks at
};

}  // namespace

uint64_t transfer_files(HubClient& client, const RepoListing& listing, Store& store,
                        const DownloadRequest& request, std::vector<TransferJob> jobs) {
  return Transfers(client, listing, store, request, std::move(jobs)).run();
}

}  // namespace kt::inline hub
