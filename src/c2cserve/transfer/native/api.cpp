// The C interface. Functions that can fail return null or a negative number; `c2c_transfers_error`
// has the message then, for the thread that called.
#include <string.h>

#include <algorithm>
#include <memory>

#include "called_links.h"
#include "cuda_links.h"
#include "engine.h"
#include "relay_client.h"
#include "relay_server.h"

using namespace c2c::transfer;

namespace {

enum Error { kInvalid = -1, kClosed = -2, kFault = -3 };

thread_local std::string last_error;

template <typename Body>
auto guarded(Body body, decltype(body()) (*failed)(Error)) -> decltype(body()) {
  Error error;
  try {
    return body();
  } catch (const std::invalid_argument& fault) {
    last_error = fault.what(), error = kInvalid;
  } catch (const Closed& fault) {
    last_error = fault.what(), error = kClosed;
  } catch (const std::exception& fault) {
    last_error = fault.what(), error = kFault;
  }
  return failed(error);
}

int as_number(Error error) { return error; }

struct Result {
  void* value;
  int error;
};

Result as_result(Error error) { return {nullptr, error}; }

struct Machine {  // what `open` is told of
  const PortName* ports;
  const int32_t* relays;  // pairs: (link, port that it can relay for)
  int32_t port_count, relay_count;
};

std::vector<std::pair<int, int>> pairs_of(const Machine& machine) {
  std::vector<std::pair<int, int>> pairs;
  for (int i = 0; i < machine.relay_count; ++i)
    pairs.emplace_back(machine.relays[2 * i], machine.relays[2 * i + 1]);
  return pairs;
}

Engine* make(std::unique_ptr<Links> links, const Machine& machine, const Settings& settings,
             bool threaded) {
  return new Engine(std::move(links), {machine.ports, machine.ports + machine.port_count},
                    pairs_of(machine), settings, threaded);
}

Engine& engine_of(void* engine) { return *static_cast<Engine*>(engine); }
TicketPtr& ticket_of(void* ticket) { return *static_cast<TicketPtr*>(ticket); }

}  // namespace

extern "C" {

const char* c2c_transfers_error() { return last_error.c_str(); }

// `contexts[i]` is that of the GPU whose streams carry what takes port i.
Result c2c_transfers_open(const Machine* machine, const Settings* settings, const char* library,
                          void* const* contexts, const void* cubin, const RelayShape* relay,
                          const RelayShape* own) {
  return guarded(
      [=]() -> Result {
        std::vector<LinkPlace> places;
        for (int i = 0; i < machine->port_count; ++i) {
          const PortName& port = machine->ports[i];
          const int64_t kernel_bytes[] = {settings->kernel_in_bytes, settings->kernel_out_bytes, 0};
          places.push_back({port.direction == 2 ? port.source : port.gpu, contexts[i], false,
                            uint64_t(kernel_bytes[port.direction])});
        }
        for (auto [link, _] : pairs_of(*machine)) places[link].relays = true;
        Settings chosen = *settings;
        chosen.relay_pieces_most = std::min(chosen.relay_pieces_most, kRelayPieces);
        auto links = std::make_unique<CudaLinks>(
            library, places, RelayCode{cubin, *relay}, RelayCode{cubin, *own}, chosen.depth,
            uint64_t(chosen.batch_bytes));
        return {make(std::move(links), *machine, chosen, true), 0};
      },
      as_result);
}

// For tests. Without a thread, `c2c_transfers_turn` is called.
Result c2c_transfers_open_called(const Machine* machine, const Settings* settings,
                                 const LinkFunctions* functions, int threaded) {
  return guarded(
      [=]() -> Result {
        auto links = std::make_unique<CalledLinks>(*functions);
        return {make(std::move(links), *machine, *settings, threaded), 0};
      },
      as_result);
}

// Cancels everything, and ends the engine's thread. Returns 0 if a copy does not end in time.
int c2c_transfers_stop(void* engine, double timeout_s) {
  return engine_of(engine).close(timeout_s);
}

// Frees an engine that has been stopped, and that no other thread uses.
void c2c_transfers_delete(void* engine) { delete static_cast<Engine*>(engine); }

// `stream_gpu`: negative if there is no stream.
Result c2c_transfers_submit(void* engine, const Move* moves, int64_t count, void* stream,
                            int stream_gpu, int urgency) {
  return guarded(
      [=]() -> Result {
        const Stream after{stream, stream_gpu};
        return {new TicketPtr(engine_of(engine).submit(
                    moves, count, stream_gpu < 0 ? nullptr : &after, urgency)),
                0};
      },
      as_result);
}

int c2c_transfers_wait(void* engine, void* ticket, double timeout_s, int spins) {
  return engine_of(engine).wait(*ticket_of(ticket), timeout_s, spins);
}

void c2c_transfers_cancel(void* engine, void* ticket) {
  engine_of(engine).cancel(ticket_of(ticket));
}

int c2c_transfers_follow(void* engine, void* ticket, void* stream, int gpu) {
  return guarded(
      [=]() -> int {
        engine_of(engine).follow(ticket_of(ticket), {stream, gpu});
        return 0;
      },
      as_number);
}

// Returns -1 while the transfer moves, else its `State`.
int c2c_transfers_state(void* ticket) {
  const TicketPtr& one = ticket_of(ticket);
  return one->over.load(std::memory_order_acquire) ? int(one->transfer->state) : -1;
}

// ---- links of other processes -------------------------------------------------------------------

int64_t c2c_transfers_channel_bytes() { return kChannelBytes; }

// `channel` is zeros, and shared with the server's process.
int c2c_transfers_connect(void* engine, int link, void* channel) {
  return guarded(
      [=]() -> int {
        engine_of(engine).connect(link, static_cast<Channel*>(channel));
        return 0;
      },
      as_number);
}

void c2c_transfers_disconnect(void* engine, int link) { engine_of(engine).disconnect(link); }

void c2c_transfers_share(void* engine, int link, uint64_t near, uint64_t far, uint64_t size) {
  engine_of(engine).share(link, near, far, size);
}

void c2c_transfers_unshare(void* engine, int link, uint64_t near) {
  engine_of(engine).unshare(link, near);
}

// Relays what another process submits to `channel`. `engine` is this process's: nothing is relayed
// while it moves anything.
Result c2c_relays_open(void* engine, const char* library, void* context, void* channel,
                       uint64_t border_bytes) {
  return guarded(
      [=]() -> Result {
        auto server =
            std::make_unique<RelayServer>(library, context, static_cast<Channel*>(channel),
                                          border_bytes);
        engine_of(engine).watch(server->moving());
        return {server.release(), 0};
      },
      as_result);
}

void c2c_relays_close(void* engine, void* server) {
  RelayServer* one = static_cast<RelayServer*>(server);
  engine_of(engine).unwatch(one->moving());
  delete one;
}

void c2c_relays_streaming(void* server, int streams) {
  static_cast<RelayServer*>(server)->set_streaming(streams);
}

int64_t c2c_relays_count(void* server) { return static_cast<RelayServer*>(server)->relayed(); }

// Returns how many bytes have arrived.
int64_t c2c_transfers_moved(void* ticket) { return ticket_of(ticket)->transfer->moved; }

// The fault of a transfer that is over.
const char* c2c_transfers_fault(void* ticket) { return ticket_of(ticket)->transfer->fault.c_str(); }

void c2c_transfers_free(void* ticket) { delete &ticket_of(ticket); }

void c2c_transfers_counts(void* engine, int link, LinkCounts* counts) {
  const std::lock_guard<std::mutex> lock(engine_of(engine).mutex());
  *counts = engine_of(engine).schedule().links()[link].counts;
}

// Writes what has gone wrong, in words, and returns whether there was anything.
int c2c_transfers_incident(void* engine, char* text, int64_t size) {
  const std::string incident = engine_of(engine).next_incident();
  strncpy(text, incident.c_str(), size - 1);
  text[size - 1] = 0;
  return !incident.empty();
}

// ---- for tests ----------------------------------------------------------------------------------

void c2c_transfers_turn(void* engine, double now_s) { engine_of(engine).turn(now_s); }

double c2c_transfers_due(void* engine, double now_s) {
  return engine_of(engine).schedule().due(now_s);
}

// Writes the micro-tasks that are on a link, `most` of them, and returns how many there are.
int c2c_transfers_outstanding(void* engine, int link, TaskView* tasks, int most) {
  const std::lock_guard<std::mutex> lock(engine_of(engine).mutex());
  const auto& outstanding = engine_of(engine).schedule().links()[link].outstanding;
  for (int i = 0; i < std::min(most, int(outstanding.size())); ++i)
    tasks[i] = view_of(*outstanding[i]);
  return int(outstanding.size());
}

// Returns a stream of a link's relays, null if there is none: a test lets it stand still.
void* c2c_transfers_relay_stream(void* engine, int link, int lane) {
  const auto* links = dynamic_cast<const CudaLinks*>(&engine_of(engine).links());
  return links == nullptr ? nullptr : links->relay_stream(link, lane);
}

}  // extern "C"
