// Steps the native machines one event at a time, for tests: no threads, no sockets.
//
// An event and its answer are arrays of numbers; `tests/native/stepped.py` has the other side.
#include <cstring>
#include <memory>

#include "server.hpp"
#include "squares.hpp"
#include "wire.hpp"
#include "worker.hpp"

using namespace foreprop;
using Number = std::int64_t;

namespace {

// Numbers in the order in which they were written; a list is its length and its elements.
class Reader {
  public:
    explicit Reader(const Number* at) : at_(at) {}
    Number next() { return *at_++; }
    int integer() { return static_cast<int>(next()); }
    template <class Each>
    auto list(Each each) {
        std::vector<decltype(each())> found;
        for (Number left = next(); left > 0; --left) found.push_back(each());
        return found;
    }
    std::vector<int> integers() {
        return list([this] { return integer(); });
    }

  private:
    const Number* at_;
};

struct Answer {
    std::vector<Number> numbers;
    std::string text;

    // What is said of members, in an instruction's fields.
    void add(int what, Number a, Number b, Number c, Number d) {
        for (Number n : {Number{what}, Number{0}, Number{0}, a, b, c, d, Number{0}, Number{0},
                         Number{0}, Number{0}, Number{0}, Number{0}})
            numbers.push_back(n);
    }
    void add(const Instruction& each) {
        const Frame& f = each.frame;
        for (Number n : {Number{each.what}, Number{f.peer}, Number{f.kind}, f.step, Number{f.slice},
                         Number{f.priority}, Number{f.flags}, f.token, Number{each.average},
                         Number{each.measured}, Number{each.blamed}, Number{each.counted},
                         static_cast<Number>(each.ranks.size())})
            numbers.push_back(n);
        for (int rank : each.ranks) numbers.push_back(rank);
        text += each.reason;
    }
};

Turns turns_of(Reader& in) {
    const int first = in.integer(), at_once = in.integer(), at_least = in.integer();
    return {first, at_once, at_least, in.next() != 0};
}
Frame frame_of(Reader& in) {
    const int peer = in.integer(), kind = in.integer();
    const Step step = in.next();
    const int priority = in.integer(), slice = in.integer();
    const Number token = in.next();
    return {peer, kind, step, slice, priority, static_cast<Flags>(in.next()), token};
}

Instructions step_worker(WorkerMachine& machine, Reader in) {
    const int event = in.integer();
    if (event == 0) {
        const int parameter = in.integer();
        const Step step = in.next();
        const auto flags = static_cast<Flags>(in.next());
        return machine.gradient_ready(parameter, step, flags, in.next() != 0);
    }
    if (event == 1) return machine.values_offered();
    if (event == 2) return machine.values_awaited(in.next());
    if (event == 3) return machine.message_ready(frame_of(in));
    if (event == 4) return machine.frame_sent(in.integer());
    if (event == 5 || event == 6) {
        const int slice = in.integer();
        const Step step = in.next();
        const int server = in.integer();
        const auto flags = static_cast<Flags>(in.next());
        return event == 5 ? machine.reply_arrived(slice, step, server, flags)
                          : machine.notify_arrived(slice, step, server, flags);
    }
    if (event == 7) return machine.pulls_due();
    if (event == 8) return machine.priorities_learned(in.integers());
    if (event == 9) return machine.came_after(in.next());
    if (event == 10) {
        const int server = in.integer();
        return machine.slices_lost(server, in.list([&in] {
            const int slice = in.integer();
            return std::pair{slice, in.integer()};
        }));
    }
    if (event == 11) {
        return machine.slices_go_on(in.list([&in] {
            const int slice = in.integer();
            const Step step = in.next();
            return std::pair{slice, Round{step, in.next()}};
        }));
    }
    return machine.closing();
}

Instructions step_server(ServerMachine& machine, Reader in, Answer& answer) {
    const int event = in.integer();
    if (event == 7) {
        const Departure left = machine.peer_dropped(in.integer());
        if (left.is_told) answer.add(7, left.step, left.counted, left.slices, 0);
        return machine.go_on();
    }
    if (event == 8) {
        const int rank = in.integer();
        const Promise found = machine.join_asked(rank, in.next());
        answer.add(8, found.step, found.least, found.newest, found.ending);
        return machine.go_on();
    }
    if (event == 9) {
        const int rank = in.integer();
        machine.join_settled(rank, in.next());
        return machine.go_on();
    }
    if (event == 10) {
        const int slice = in.integer();
        const Step step = in.next();
        machine.slice_settled(slice, "bias", {step, in.next()});
        return {};
    }
    if (event == 0 || event == 1 || event == 2) {
        const int rank = in.integer(), slice = in.integer();
        const Step step = in.next();
        const int priority = in.integer();
        if (event == 1) return machine.value_arrived(rank, slice, step, priority);
        if (event == 2) return machine.pull_arrived(rank, slice, step, priority);
        const auto flags = static_cast<Flags>(in.next());
        return machine.push_arrived(rank, slice, step, priority, flags);
    }
    if (event == 3) return machine.slice_updated(in.next() != 0);
    if (event == 4) return machine.frame_sent(in.integer());
    if (event == 5) return machine.message_ready(frame_of(in));
    return machine.peer_left(in.integer());
}

// How many numbers the answer has, or whose mistake the event was, below 0.
template <class Step>
int answered(Step step, Number* out, int most, char* text, int most_text) {
    Answer answer;
    int result;
    try {
        for (const Instruction& each : step(answer)) answer.add(each);
        result = static_cast<int>(answer.numbers.size());
        if (result > most) return -99;
        std::memcpy(out, answer.numbers.data(), answer.numbers.size() * sizeof(Number));
    } catch (const ProtocolError& error) {
        answer.text = error.what();
        result = -error.whose;
    }
    std::strncpy(text, answer.text.c_str(), most_text - 1);
    return result;
}

}  // namespace

extern "C" {

void* fp_worker_new(const Number* numbers) {
    Reader in(numbers);
    WorkerSetting setting;
    setting.slices = in.list([&in] {
        const int parameter = in.integer();
        return Slice{parameter, in.integer()};
    });
    setting.parameters = in.integer();
    setting.order = static_cast<Order>(in.integer());
    setting.reply = static_cast<Reply>(in.integer());
    setting.turns = turns_of(in);
    setting.packs = in.list([&in] { return in.integers(); });
    setting.outlives = in.next() != 0;
    setting.window_sizes_bytes = in.list([&in] { return in.next(); });
    setting.window_bytes = in.next();
    setting.window_servers = in.integer();
    return new WorkerMachine(std::move(setting));
}
void fp_worker_free(void* machine) { delete static_cast<WorkerMachine*>(machine); }
int fp_worker_step(void* machine, const Number* event, Number* out, int most, char* text,
                   int most_text) {
    auto& worker = *static_cast<WorkerMachine*>(machine);
    return answered([&](Answer&) { return step_worker(worker, Reader(event)); }, out, most, text,
                    most_text);
}
// queue depth, most queued, awaited
void fp_worker_counts(const void* machine, int* out) {
    const auto& worker = *static_cast<const WorkerMachine*>(machine);
    out[0] = worker.queue_depth();
    out[1] = worker.most_queued();
    out[2] = worker.awaited();
}
int fp_worker_complete(const void* machine, int parameter) {
    return static_cast<const WorkerMachine*>(machine)->is_complete(parameter);
}
// owner, claim's step and round, whether its answer was that nothing has changed
void fp_worker_slice(const void* machine, int slice, Number* out) {
    const auto& worker = *static_cast<const WorkerMachine*>(machine);
    const Round claim = worker.claim(slice);
    out[0] = worker.owner_of(slice);
    out[1] = claim.step;
    out[2] = claim.again;
    out[3] = worker.was_unchanged(slice);
}

void* fp_server_new(const Number* numbers, const char* names) {
    Reader in(numbers);
    ServerSetting setting;
    setting.index = in.integer();
    setting.workers = in.integer();
    setting.started = in.integer();
    setting.elastic = in.next() != 0;
    setting.order = static_cast<Order>(in.integer());
    setting.reply = static_cast<Reply>(in.integer());
    setting.turns = turns_of(in);
    setting.slices = in.integers();
    for (const char* at = names; setting.names.size() < setting.slices.size();) {
        setting.names.emplace_back(at);
        at += setting.names.back().size() + 1;
    }
    return new ServerMachine(std::move(setting));
}
void fp_server_free(void* machine) { delete static_cast<ServerMachine*>(machine); }
int fp_server_step(void* machine, const Number* event, Number* out, int most, char* text,
                   int most_text) {
    auto& server = *static_cast<ServerMachine*>(machine);
    return answered([&](Answer& answer) { return step_server(server, Reader(event), answer); }, out,
                    most, text, most_text);
}
// What of a connection's bound is in force after each of `count` pairs of round trips.
void fp_send_bound(int most_bytes, const std::uint32_t* pairs, int count, int* bytes) {
    SendBound bound(most_bytes);
    for (int n = 0; n < count; ++n) {
        bound.observe(pairs[2 * n], pairs[2 * n + 1]);
        bytes[n] = bound.bytes();
    }
}
std::uint32_t fp_crc32c(const void* data, Number size, std::uint32_t before) {
    return crc32c(data, static_cast<std::size_t>(size), before);
}
void fp_encode_header(const Number* f, const void* payload, int checked, std::uint8_t* out) {
    const Header header{static_cast<int>(f[0]),           static_cast<std::uint16_t>(f[1]),
                        static_cast<std::uint16_t>(f[2]), static_cast<Step>(f[3]),
                        static_cast<std::uint32_t>(f[4]), static_cast<std::int32_t>(f[5]),
                        static_cast<std::uint32_t>(f[6])};
    encode_header(header, payload, checked != 0, out);
}
// Reads a stream that comes in such pieces, as far as it goes. Payloads may have exactly `agreed`
// bytes, or none. A frame is its header's seven fields and whether its payload was damaged; payloads
// follow each other in `payloads`. Answers as `answered` does; `cut`: whether a frame is begun.
int fp_read(const std::uint8_t* data, const Number* pieces, int count, std::uint64_t known,
            int checked, int agreed, Number* out, std::uint8_t* payloads, int* cut, char* text,
            int most_text) {
    int length = 0;
    std::uint8_t* payload = payloads;
    const auto destination = [&](const Header& header, const std::uint8_t*) {
        if (header.payload_bytes && static_cast<int>(header.payload_bytes) != agreed)
            throw ProtocolError(ProtocolError::remote, "not agreed");
        return payload;
    };
    FrameReader reader(destination, known, checked != 0);
    try {
        for (const Number* piece = pieces; piece < pieces + count; ++piece) {
            for (Number left = *piece; left > 0;) {
                const auto room = reader.wanted();
                const Number taken = std::min(left, static_cast<Number>(room.size));
                std::memcpy(room.data, data, static_cast<std::size_t>(taken));
                data += taken;
                left -= taken;
                const auto frame = reader.advance(static_cast<std::size_t>(taken));
                if (!frame) continue;
                const Header& h = frame->header;
                payload += h.payload_bytes;
                for (Number n : {Number{h.kind}, Number{h.flags}, Number{h.rank}, Number{h.step},
                                 Number{h.slice}, Number{h.priority}, Number{h.payload_bytes},
                                 Number{frame->damaged}})
                    out[length++] = n;
            }
        }
        *cut = reader.mid_frame();
        return length;
    } catch (const ProtocolError& error) {
        std::strncpy(text, error.what(), most_text - 1);
        out[0] = length;
        return -error.whose;
    }
}
void fp_reduce(int dtype, void* total, void** parts, int count, Number elems, int mean, int workers,
               double scale) {
    const Reduction reduction{mean != 0, workers, scale};
    const auto size = static_cast<std::size_t>(elems);
    of_type(static_cast<Dtype>(dtype), [&]<class Each>(Each*) {
        std::vector<const Each*> all;
        for (int part = 0; part < count; ++part) all.push_back(static_cast<const Each*>(parts[part]));
        if constexpr (std::is_floating_point_v<Each>) {
            reduce(static_cast<Each*>(total), all, size, reduction);
        } else {
            reduce_halves(static_cast<Each*>(total), all, size, reduction);
        }
    });
}
void fp_narrow(int dtype, void* to, const float* from, Number elems) {
    const auto size = static_cast<std::size_t>(elems);
    if (static_cast<Dtype>(dtype) == Dtype::bfloat16) {
        sums_detail::narrow(static_cast<Bfloat16*>(to), from, size);
    } else {
        sums_detail::narrow(static_cast<Float16*>(to), from, size);
    }
}
int fp_server_has_sent_all(const void* machine, int rank) {
    return static_cast<const ServerMachine*>(machine)->has_sent_all(rank);
}
int fp_server_depth(const void* machine) {
    return static_cast<const ServerMachine*>(machine)->queue_depth();
}
}
