#include "engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

#include "relay_client.h"

namespace c2c::transfer {
namespace {

// While nothing changes, polls get rarer: this part of the time since the last change, to a limit.
constexpr double kPollShare = 1.0 / 16, kPollMostS = 1e-3;
constexpr size_t kIncidentsMost = 64;

using Clock = std::chrono::steady_clock;

std::chrono::time_point<Clock, std::chrono::duration<double>> at(double seconds) {
  return std::chrono::time_point<Clock, std::chrono::duration<double>>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

Engine::Engine(std::unique_ptr<Links> links, std::vector<PortName> ports,
               const std::vector<std::pair<int, int>>& relays, const Settings& settings,
               bool threaded)
    : links_(std::move(links)),
      ports_(std::move(ports)),
      settings_(settings),
      schedule_(int(ports_.size()), relays, settings, *links_) {
  for (int i = 0; i < int(ports_.size()); ++i)
    if (ports_[i].direction == 2) schedule_.set_alone(i, settings.peer_bytes);
  if (threaded) thread_ = std::thread(&Engine::work, this);
}

Engine::~Engine() { close(kNever); }

double Engine::clock() const {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// ---- callers ------------------------------------------------------------------------------------

int Engine::port_of(const Move& move) const {
  const bool in = move.source_gpu < 0, out = move.target_gpu < 0;
  if (in && out) throw std::invalid_argument("a segment from host to host memory takes no link");
  if (move.size < 0) throw std::invalid_argument("a segment has 0 bytes or more");
  const int direction = in ? 0 : out ? 1 : 2;
  const int64_t gpu = out ? move.source_gpu : move.target_gpu;
  for (int i = 0; i < int(ports_.size()); ++i) {
    const PortName& port = ports_[i];
    if (port.direction == direction && port.gpu == gpu &&
        (direction != 2 || port.source == move.source_gpu))
      return i;
  }
  throw std::invalid_argument("no path for a segment from " + std::to_string(move.source_gpu) +
                              " to " + std::to_string(move.target_gpu) + " (-1: host memory)");
}

TicketPtr Engine::sorted(const Move* moves, int64_t count) const {
  auto ticket = std::make_shared<Ticket>();
  auto& by_port = ticket->by_port;
  for (int64_t i = 0; i < count; ++i) {
    const Move& move = moves[i];
    const int port = port_of(move);
    auto found = std::find_if(by_port.rbegin(), by_port.rend(),
                              [port](const auto& one) { return one.first == port; });
    if (found == by_port.rend()) {
      by_port.push_back({port, {}});
      found = by_port.rbegin();
    }
    cut(move, found->second);
  }
  return ticket;
}

// Appends what a move copies. Registrations of host memory may meet at borders, and the driver
// refuses copies that cross from one into another.
void Engine::cut(const Move& move, std::vector<Piece>& pieces) const {
  const bool in = move.source_gpu < 0, out = move.target_gpu < 0;
  const uint64_t host = in ? move.source : move.target, border = settings_.border_bytes;
  uint64_t size = 0;
  for (uint64_t at = 0; at < uint64_t(move.size); at += size) {
    size = move.size - at;
    if (in || out) size = std::min(size, border - (host + at) % border);
    pieces.push_back({move.target + at, move.source + at, size});
  }
}

// Checks the lowest and the highest byte of host memory.
void Engine::check_host(const Move* moves, int64_t count) {
  uint64_t lowest = UINT64_MAX, highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Move& move = moves[i];
    if (move.size == 0 || (move.source_gpu >= 0 && move.target_gpu >= 0)) continue;
    const uint64_t start = move.source_gpu < 0 ? move.source : move.target;
    lowest = std::min(lowest, start);
    highest = std::max(highest, start + move.size - 1);
  }
  if (lowest > highest) return;
  links_->check_host(lowest);
  links_->check_host(highest);
}

TicketPtr Engine::submit(const Move* moves, int64_t count, const Stream* stream, int urgency) {
  if (urgency < 0 || urgency >= kClasses) throw std::invalid_argument("no such class of urgency");
  const TicketPtr ticket = sorted(moves, count);
  ticket->transfer->urgency = urgency;
  uint64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) bytes += moves[i].size;
  std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) throw Closed("the transfer engine is closed");
  progress_s_ = ticket->since_s = clock();
  check_host(moves, count);
  const bool small = int64_t(bytes) <= settings_.one_path_bytes;
  if (small && ticket->by_port.size() == 1 && urgency != kBackground) {
    auto& [port, pieces] = ticket->by_port.front();
    ticket->copied = links_->copy(port, pieces, stream);
    copies_.push_back(ticket);
    tell_watchers();
  } else {
    if (stream != nullptr) ticket->before = links_->mark(*stream);
    gated_.push_back(ticket);
    if (thread_.joinable()) take_turn(ticket->since_s);
  }
  wake();
  return ticket;
}

bool Engine::wait(const Ticket& ticket, double timeout_s, bool spins) {
  const double began_s = clock(), until_s = began_s + timeout_s;
  const double spins_until_s = spins ? std::min(until_s, began_s + settings_.spin_s) : began_s;
  while (!ticket.over.load(std::memory_order_acquire)) {
    const double now_s = clock();
    if (now_s >= spins_until_s) break;
    if (mutex_.try_lock()) {
      take_turn(now_s);
      mutex_.unlock();
    }
    relax();
  }
  const auto is_over = [&] { return ticket.over.load(std::memory_order_acquire); };
  std::unique_lock<std::mutex> lock(mutex_);
  if (until_s == kNever)
    over_.wait(lock, is_over);
  else
    over_.wait_until(lock, at(until_s), is_over);
  return is_over();
}

void Engine::cancel(const TicketPtr& ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  cancel_now(ticket);
  finish();
  wake();
}

void Engine::cancel_now(const TicketPtr& ticket) {
  if (ticket->over || ticket->copied != nullptr) return;
  const auto gated = std::find(gated_.begin(), gated_.end(), ticket);
  if (gated != gated_.end()) {
    gated_.erase(gated);
    moving_.push_back(ticket);
  }
  schedule_.cancel(ticket->transfer);
}

void Engine::follow(const TicketPtr& ticket, const Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ticket->over) return;
  const bool gated = std::find(gated_.begin(), gated_.end(), ticket) != gated_.end();
  if (gated || ticket->transfer->waiting > 0)
    throw std::invalid_argument("a stream cannot follow what has not begun");
  if (ticket->copied != nullptr) links_->follow(stream, ticket->copied);
  std::vector<Task*> tasks;
  for (const Link& link : schedule_.links())
    for (const auto& task : link.outstanding)
      if (task->transfer == ticket->transfer && !task->given_up) tasks.push_back(task.get());
  for (Task* task : tasks) {
    if (links_->is_remote(task->link)) {
      if (ticket->transfer->state == State::kMoving)
        throw std::invalid_argument("a stream follows other processes' relays when cancelled");
      if (!task->recalled) schedule_.recall(task);
      links_->recall(*task);
      if (links_->is_harmless(*task)) {
        schedule_.give_up(task);
        continue;
      }
    }
    links_->follow(stream, *task);
  }
}

bool Engine::close(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  closing_ = true;
  wake();
  if (!thread_.joinable()) return true;
  const auto has_ended = [this] { return ended_; };
  if (timeout_s == kNever)
    over_.wait(lock, has_ended);
  else if (!over_.wait_until(lock, at(clock() + timeout_s), has_ended))
    return false;
  lock.unlock();
  thread_.join();
  return true;
}

std::string Engine::next_incident() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (incidents_.empty()) return "";
  std::string first = incidents_.front();
  incidents_.erase(incidents_.begin());
  return first;
}

std::string Engine::name_of(int link) const {
  const PortName& port = ports_[link];
  const std::string gpu = std::to_string(port.gpu);
  if (port.direction == 2) return "peer" + std::to_string(port.source) + "to" + gpu;
  return (port.direction == 0 ? "in" : "out") + gpu;
}

void Engine::note(std::string incident) {
  if (incidents_.size() < kIncidentsMost) incidents_.push_back(std::move(incident));
}

// ---- a turn, with the lock ------------------------------------------------------------

void Engine::turn(double now_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  take_turn(now_s);
}

void Engine::take_turn(double now_s) {
  admit();
  if (closing_) {
    for (const TicketPtr& ticket : std::vector<TicketPtr>(gated_)) cancel_now(ticket);
    for (const TicketPtr& ticket : std::vector<TicketPtr>(moving_)) cancel_now(ticket);
  }
  collect(now_s);
  recall(now_s);
  feed(now_s);
  finish();
  tell_watchers();
}

void Engine::admit() {
  if (gated_.empty()) return;
  std::vector<TicketPtr> still;
  for (const TicketPtr& ticket : std::exchange(gated_, {})) {
    try {
      if (ticket->before != nullptr && !links_->is_passed(ticket->before)) {
        still.push_back(ticket);
        continue;
      }
    } catch (const Fault& fault) {  // the stream of the caller is broken
      refuse(ticket, fault.what());
      continue;
    }
    moving_.push_back(ticket);
    schedule_.add(ticket->transfer, std::move(ticket->by_port));
  }
  gated_ = std::move(still);
}

void Engine::collect(double now_s) {
  for (size_t i = 0; i < schedule_.links().size(); ++i) {
    std::vector<Task*> tasks;
    for (const auto& task : schedule_.links()[i].outstanding) tasks.push_back(task.get());
    bool direct_moves = false;  // direct copies of a link end in order
    for (Task* task : tasks) {
      if (direct_moves && !task->relayed) continue;
      try {
        if (links_->is_over(*task)) {
          schedule_.arrived(task, now_s);
          progress_s_ = now_s;
          continue;
        }
        direct_moves |= !task->relayed;
        if (task->recalled && !task->given_up && links_->is_harmless(*task)) {
          schedule_.give_up(task);
        }
      } catch (const Fault& fault) {
        failed(task, fault.what());
      }
    }
  }
}

void Engine::recall(double now_s) {
  const auto late = schedule_.stalled(now_s);
  for (Task* task : late)
    note(name_of(task->link) + " is late with a relay, and relays no more for a while");
  for (const auto& tasks : {late, schedule_.yielding(now_s)}) {
    for (Task* task : tasks) {
      try {
        links_->recall(*task);
        if (links_->is_harmless(*task)) schedule_.give_up(task);
      } catch (const Fault& fault) {
        failed(task, fault.what());
      }
    }
  }
}

void Engine::feed(double now_s) {
  // Links take turns, so that all of them begin soon, and share what is short.
  for (bool fed = true; fed;) {
    fed = false;
    const int links = int(schedule_.links().size());
    for (int i = 0; i < links; ++i)
      if (schedule_.has_own(i)) fed |= feed_link(i, now_s);
    if (!schedule_.waiting()) return;
    for (int i = 0; i < links; ++i)
      if (!schedule_.has_own(i)) fed |= feed_link(i, now_s);
  }
}

bool Engine::feed_link(int link, double now_s) {
  Task* task = schedule_.pull(link, now_s);
  if (task == nullptr) return false;
  try {
    links_->start(*task);
  } catch (const Fault& fault) {
    failed(task, fault.what());
  }
  return true;
}

void Engine::failed(Task* task, const std::string& fault) {
  if (task->relayed) note(name_of(task->link) + " relays no more: " + fault);
  schedule_.failed(task, fault);
}

void Engine::finish() {
  for (const TransferPtr& transfer : schedule_.take_over()) {
    const auto ticket = std::find_if(moving_.begin(), moving_.end(), [&](const TicketPtr& one) {
      return one->transfer == transfer;
    });
    if (ticket == moving_.end()) continue;
    const TicketPtr ended = *ticket;
    moving_.erase(ticket);
    end(ended);
  }
  for (const TicketPtr& ticket : std::vector<TicketPtr>(copies_)) {
    try {
      if (!links_->is_passed(ticket->copied)) continue;
      for (const auto& [port, pieces] : ticket->by_port) {
        uint64_t bytes = 0;
        for (const Piece& piece : pieces) bytes += piece.size;
        schedule_.count_direct(port, bytes);
        ticket->transfer->moved += bytes;
      }
      ticket->transfer->state = State::kDone;
    } catch (const Fault& fault) {
      ticket->transfer->state = State::kFailed;
      ticket->transfer->fault = fault.what();
    }
    copies_.erase(std::find(copies_.begin(), copies_.end(), ticket));
    end(ticket);
  }
}

void Engine::refuse(const TicketPtr& ticket, const std::string& fault) {
  ticket->transfer->state = State::kFailed;
  ticket->transfer->fault = fault;
  end(ticket);
}

void Engine::end(const TicketPtr& ticket) {
  if (ticket->before != nullptr) links_->drop(ticket->before);
  if (ticket->copied != nullptr) links_->drop(ticket->copied);
  ticket->before = ticket->copied = nullptr;
  ticket->by_port.clear();
  ticket->over.store(true, std::memory_order_release);
  over_.notify_all();
}

// ---- the engine's thread ------------------------------------------------------------------------

bool Engine::idle() const {
  return gated_.empty() && moving_.empty() && copies_.empty() && schedule_.outstanding() == 0;
}

// Returns when a turn is due; infinity: when something is submitted.
double Engine::wakes_at(double now_s) const {
  const bool waits_for_links =
      !gated_.empty() || !copies_.empty() || schedule_.outstanding() > 0;
  const double rarer_s = std::min(kPollMostS, kPollShare * (now_s - progress_s_));
  const double poll_s = waits_for_links ? now_s + std::max(settings_.poll_s, rarer_s) : kNever;
  return std::min(poll_s, schedule_.due(now_s));
}

// Wakes the thread, unless it polls soon anyway.
void Engine::wake() {
  if (asleep_until_s_ <= clock() + settings_.poll_s && !closing_) return;
  woken_ = true;
  wake_.notify_one();
}

// ---- other processes ----------------------------------------------------------------------------

void Engine::connect(int link, Channel* channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  RelayClient& remote = links_->remote(link);
  if (!schedule_.links()[link].outstanding.empty())
    throw std::invalid_argument("the link still has micro-tasks");
  remote.connect(channel);
  schedule_.connect(link, clock());
  wake();
}

void Engine::disconnect(int link) {
  links_->remote(link).lose();  // now: a caller that waits for its relays has the lock
  std::lock_guard<std::mutex> lock(mutex_);
  schedule_.disconnect(link);
  wake();
}

void Engine::share(int link, uint64_t near, uint64_t far, uint64_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  links_->remote(link).share(near, far, size);
}

void Engine::unshare(int link, uint64_t near) {
  std::lock_guard<std::mutex> lock(mutex_);
  links_->remote(link).unshare(near);
}

void Engine::watch(uint32_t* moving) {
  std::lock_guard<std::mutex> lock(mutex_);
  watchers_.push_back(moving);
  tell_watchers();
}

void Engine::unwatch(uint32_t* moving) {
  std::lock_guard<std::mutex> lock(mutex_);
  watchers_.erase(std::remove(watchers_.begin(), watchers_.end(), moving), watchers_.end());
}

void Engine::tell_watchers() {
  const uint32_t moves = !moving_.empty() || !copies_.empty();
  for (uint32_t* watcher : watchers_)
    if (read(*watcher) != moves) write(*watcher, moves);
}

void Engine::work() {
  prctl(PR_SET_NAME, "transfers");
  prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds: it sleeps for tens of microseconds
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const double now_s = clock();
    take_turn(now_s);
    if (closing_ && idle()) break;
    asleep_until_s_ = wakes_at(now_s);  // of that time: a pause may have ended since
    if (asleep_until_s_ == kNever)
      wake_.wait(lock, [this] { return woken_; });
    else
      wake_.wait_until(lock, at(asleep_until_s_), [this] { return woken_; });
    woken_ = false;
    asleep_until_s_ = 0;
  }
  ended_ = true;
  over_.notify_all();
}

}  // namespace c2c::transfer
