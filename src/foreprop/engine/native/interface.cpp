// The plane's C interface, for ctypes. No exception crosses it: what a call refuses is in `fp_error`.
#include "plane.hpp"
#include "quantising.hpp"

using namespace foreprop;
using Number = std::int64_t;

namespace {

thread_local std::string refused;

template <class Call>
int guarded(Call call) {
    try {
        call();
        return 0;
    } catch (const ProtocolError& error) {
        refused = error.what();
        return error.whose;
    } catch (const std::exception& error) {
        refused = error.what();
        return ProtocolError::internal;
    }
}

// Numbers of a setting, one after the other.
class Numbers {
  public:
    explicit Numbers(const Number* at) : at_(at) {}
    Number next() { return *at_++; }
    int number() { return static_cast<int>(next()); }
    std::vector<int> list() {
        std::vector<int> all(static_cast<std::size_t>(next()));
        for (int& each : all) each = number();
        return all;
    }
    Turns turns() {
        Turns made;
        made.first = number();
        made.at_once = number();
        made.at_least = number();
        made.in_order = next() != 0;
        return made;
    }

  private:
    const Number* at_;
};

// What a call gives, or this if it is refused.
template <class Result, class Call>
Result either(Result otherwise, Call call) {
    guarded([&] { otherwise = static_cast<Result>(call()); });
    return otherwise;
}

Plane* of(void* plane) { return static_cast<Plane*>(plane); }

}  // namespace

extern "C" {

// `numbers` as `engine.plane.Plane` writes them; `names`: the parameters', each with a 0 behind it.
void* fp_new(const Number* numbers, const char* names) {
    Numbers from(numbers);
    PlaneSetting setting{};
    setting.rank = from.number();
    setting.workers = from.number();
    setting.started = from.number();
    setting.elastic = from.next() != 0;
    setting.parameters = from.number();
    setting.known = static_cast<std::uint64_t>(from.next());
    setting.checked = from.next() != 0;
    setting.checks_finite = from.next() != 0;
    setting.unsent_bytes = static_cast<std::size_t>(from.next());
    setting.order = from.next() ? Order::fifo : Order::priority;
    setting.reply = static_cast<Reply>(from.next());
    setting.turns = from.turns();
    for (Number left = from.next(); left; --left) {
        const int index = from.number();
        setting.servers.emplace_back(index, from.turns());
    }
    setting.window_bytes = from.next();
    setting.window_servers = from.number();
    for (int each : from.list()) setting.window_sizes_bytes.push_back(each);
    for (Number left = from.next(); left; --left) setting.packs.push_back(from.list());
    for (Number left = from.next(); left; --left) {
        Piece piece{};
        piece.parameter = from.number();
        piece.server = from.number();
        piece.start_bytes = static_cast<std::size_t>(from.next());
        piece.whole_bytes = static_cast<std::size_t>(from.next());
        piece.size_bytes = static_cast<std::size_t>(from.next());
        piece.dtype = static_cast<Dtype>(from.next());
        piece.mean = from.next() != 0;
        piece.codec = static_cast<Codec>(from.next());
        if (piece.usual_bytes() >= piece.size_bytes) piece.codec = Codec::none;  // it gains nothing
        for (Number places = from.next(); places; --places) {
            const auto begin = static_cast<std::size_t>(from.next());
            piece.places.emplace_back(begin, static_cast<std::size_t>(from.next()));
        }
        setting.slices.push_back(piece);
    }
    for (int left = setting.parameters; left; --left) {
        setting.names.emplace_back(names);
        names += setting.names.back().size() + 1;
    }
    void* made = nullptr;
    guarded([&] { made = new Plane(std::move(setting)); });
    return made;
}
// Raised with every change of this interface.
int fp_version() { return 8; }
// What the squares of so many elements of a type add up to, as it travels. Of no plane.
void fp_square_sum(int dtype, const void* from, Number elems, std::uint8_t* encoded) {
    const auto size = static_cast<std::size_t>(elems);
    of_type(static_cast<Dtype>(dtype), [&]<class Each>(Each*) {
        square_sum(static_cast<const Each*>(from), size).encode(encoded);
    });
}
// Blocks of float32 in as many levels; `error` may be null.
void fp_quantise(int levels, const float* values, float* error, Number elems, std::uint8_t* code) {
    Quantiser{levels}.encode(values, error, static_cast<std::size_t>(elems), code);
}
int fp_dequantise(int levels, const std::uint8_t* code, Number elems, float* values) {
    return Quantiser{levels}.decode(code, static_cast<std::size_t>(elems), values);
}
void fp_free(void* plane) { delete of(plane); }
void fp_error(char* text, int most) { std::snprintf(text, static_cast<std::size_t>(most), "%s", refused.c_str()); }
void fp_descriptors(void* plane, int* four) {
    for (int fd : of(plane)->descriptors()) *four++ = fd;
}

// Connections.
std::uint64_t fp_adopt(void* plane, int role, int index, int fd) {
    return either(std::uint64_t{0}, [&] {
        return of(plane)->adopt(static_cast<Role>(role), index, fd);
    });
}
void fp_carry(void* plane, std::uint64_t id, int peer) {
    guarded([&] { of(plane)->carry(id, peer); });
}
void fp_pace(void* plane, std::uint64_t id, int egress, int ingress, double seconds_per_byte) {
    guarded([&] { of(plane)->pace(id, egress, ingress, seconds_per_byte); });
}
void fp_bound(void* plane, std::uint64_t id, int waits, int most_bytes) {
    guarded([&] { of(plane)->bound(id, waits != 0, most_bytes); });
}
Number fp_read(void* plane, std::uint64_t id, void* to, Number most) {
    return static_cast<Number>(of(plane)->read(id, static_cast<std::uint8_t*>(to),
                                               static_cast<std::size_t>(most)));
}
// How it ended; a number and a step with some kinds, see `End`.
int fp_end(void* plane, std::uint64_t id, Number* number_and_step, char* text, int most) {
    const End end = of(plane)->end_of(id);
    number_and_step[0] = end.number;
    number_and_step[1] = end.step;
    std::snprintf(text, static_cast<std::size_t>(most), "%s", end.text.c_str());
    return end.kind;
}
int fp_write(void* plane, std::uint64_t id, const void* header, Number size, const void* payload,
             Number payload_size) {
    return either(ENOMEM, [&] {
        return of(plane)->write(id, static_cast<const std::uint8_t*>(header),
                                static_cast<std::size_t>(size),
                                static_cast<const std::uint8_t*>(payload),
                                static_cast<std::size_t>(payload_size));
    });
}
void fp_release(void* plane, std::uint64_t id) { of(plane)->release(id); }

// The worker.
int fp_push(void* plane, int parameter, Number step, int flags, const void* gradient, void* result,
            Number* word, Number number) {
    return guarded([&] {
        of(plane)->push(parameter, step, static_cast<Flags>(flags), gradient, result, word, number);
    });
}
// The worker's (-1), or a server's.
void fp_message(void* plane, int index, int peer, int kind, Number step, int slice, int priority,
                int flags, const void* payload, Number size) {
    const Frame frame{peer, kind, step, slice, priority, static_cast<Flags>(flags), no_token};
    guarded([&] {
        of(plane)->message(index, frame, static_cast<const std::uint8_t*>(payload),
                           static_cast<std::size_t>(size));
    });
}
void fp_await_values(void* plane, Number step, void* const* results) {
    of(plane)->await_values(step, results);
}
void fp_pulls_due(void* plane) {
    guarded([&] { of(plane)->pulls_due(); });
}
int fp_learn(void* plane, const int* order, int count) {
    return guarded([&] { of(plane)->learn({order, order + count}); });
}
int fp_complete(void* plane, int parameter) { return of(plane)->is_complete(parameter); }
int fp_answered(void* plane, int parameter) { return of(plane)->is_answered(parameter); }
int fp_wait(void* plane, int parameter, int timeout_ms) {
    return of(plane)->wait(parameter, timeout_ms);
}
void fp_ring(void* plane) { of(plane)->ring(); }
int fp_flush(void* plane, int timeout_ms) { return of(plane)->flush(timeout_ms); }
int fp_missing(void* plane, int parameter, int* slices, int* left, int most) {
    int count = 0;
    for (const auto& [slice, has_left] : of(plane)->missing(parameter)) {
        if (count == most) break;
        slices[count] = slice;
        left[count++] = has_left;
    }
    return count;
}
Number fp_step(void* plane, int parameter) { return of(plane)->step_of(parameter); }
void fp_statistics(void* plane, Number* nine) {
    const Plane::Statistics s = of(plane)->statistics();
    for (Number each : {s.pushes, s.pushed_bytes, s.replies, s.reply_bytes, s.most_queued, s.queued,
                        s.awaited, s.raw_pushed_bytes, s.raw_reply_bytes})
        *nine++ = each;
}

// A server in this process.
// Of each slice: number, priority, the last round that is done (two numbers), the open one (two),
// how many have pushed it, and of each rank and flags. How many numbers there are; more than `most`:
// nothing is written.
Number fp_snapshot(void* plane, int index, Number* out, Number most) {
    std::vector<Number> all;
    for (const auto& each : either(std::vector<Plane::Snapshot>{},
                                   [&] { return of(plane)->snapshot(index); })) {
        all.insert(all.end(), {each.slice, each.priority, each.done.step, each.done.again,
                               each.round.step, each.round.again,
                               static_cast<Number>(each.pushed.size())});
        for (const auto& [rank, flags] : each.pushed) all.insert(all.end(), {rank, flags});
    }
    const auto size = static_cast<Number>(all.size());
    if (size <= most) std::copy(all.begin(), all.end(), out);
    return size;
}
void fp_last_push(void* plane, int index, int peer, Number* slice_and_step) {
    const auto [slice, step] = either(std::pair<int, Step>{-1, 0},
                                      [&] { return of(plane)->last_push(index, peer); });
    slice_and_step[0] = slice;
    slice_and_step[1] = step;
}
void fp_left(void* plane, int index, int peer) {
    guarded([&] { of(plane)->left(index, peer); });
}
void fp_tell_begins(void* plane, int index) {
    guarded([&] { of(plane)->tell_begins(index); });
}

// Elastic sessions: members of a server, and slices whose server is lost.
// The last step that it has pushed, how many slices have counted that, of so many; returns whether
// members knew of it. No round closes from now on until `fp_go_on`, nor after the next two.
int fp_drop(void* plane, int index, int rank, Number* three) {
    return either(0, [&] {
        const Departure left = of(plane)->drop(index, rank);
        three[0] = left.step;
        three[1] = left.counted;
        three[2] = left.slices;
        return left.is_told;
    });
}
// Returns a `core.newcomers.AnswerJoin`'s numbers, from `step` on.
int fp_join(void* plane, int index, int rank, Number step, Number* four) {
    return guarded([&] {
        const Promise found = of(plane)->join(index, rank, step);
        four[0] = found.step;
        four[1] = found.least;
        four[2] = found.newest;
        four[3] = found.ending;
    });
}
void fp_settle(void* plane, int index, int rank, Number step) {
    guarded([&] { of(plane)->settle(index, rank, step); });
}
void fp_go_on(void* plane, int index) { of(plane)->go_on(index); }
void fp_take_over(void* plane, int index, int slice, Number step, Number again) {
    guarded([&] { of(plane)->take_over(index, slice, {step, again}); });
}
// Of each round that has counted other ranks than the one before: slice, step, how many ranks, and
// those. As many as fit, from the first that has not been told; how many numbers there are.
Number fp_counted(void* plane, int index, Number* out, Number most) {
    const auto at_most = static_cast<std::size_t>(most);
    return either(0, [&] {
        std::size_t size = 0;
        for (const auto& [slice, step, ranks] : of(plane)->counted_sets(index, at_most)) {
            out[size++] = slice;
            out[size++] = step;
            out[size++] = static_cast<Number>(ranks.size());
            for (int rank : ranks) out[size++] = rank;
        }
        return size;
    });
}
int fp_sent_all(void* plane, int index, int rank) {
    return either(1, [&] { return of(plane)->has_sent_all(index, rank); });
}
// The worker's slices: as `core.worker_machine`. `pairs`: slices and their owners.
void fp_slices_lost(void* plane, int server, const int* pairs, int count) {
    std::vector<std::pair<int, int>> owners;
    for (int n = 0; n < count; ++n) owners.emplace_back(pairs[2 * n], pairs[2 * n + 1]);
    guarded([&] { of(plane)->slices_lost(server, owners); });
}
// Three numbers of each: slice, step and round.
void fp_slices_go_on(void* plane, const Number* rounds, int count) {
    std::vector<std::pair<int, Round>> all;
    for (int n = 0; n < count; ++n, rounds += 3)
        all.emplace_back(static_cast<int>(rounds[0]), Round{rounds[1], rounds[2]});
    guarded([&] { of(plane)->slices_go_on(all); });
}
void fp_came_after(void* plane, Number step) { of(plane)->came_after(step); }
// Its owner, the round of its last answer, whether that left it unchanged, the step of the answer
// that is awaited, and the round of the open push (step -1: there is none).
void fp_slice(void* plane, int slice, Number* seven) {
    guarded([&] {
        const Plane::SliceView seen = of(plane)->slice(slice);
        for (Number each : {Number{seen.owner}, seen.claim.step, seen.claim.again,
                            Number{seen.unchanged}, seen.awaited, seen.open.step, seen.open.again})
            *seven++ = each;
    });
}
// Whether Python has read all that has passed; for so long at most.
int fp_heard(void* plane, int timeout_ms) { return of(plane)->has_heard(timeout_ms); }
// Of each span of a server (-1: of the worker) its eight numbers, in their order; as many as there is
// room for, and how many were lost.
int fp_spans(void* plane, int index, Number* out, int most, Number* lost) {
    auto [all, more] = either(std::pair<std::vector<Span>, int>{},
                              [&] { return of(plane)->spans(index); });
    int count = 0;
    for (const Span& each : all) {
        if (count == most) break;
        ++count;
        for (Number number : {Number{static_cast<int>(each.stage)}, Number{each.slice}, each.step,
                              Number{each.priority}, Number{each.peer},
                              static_cast<Number>(each.bytes), each.start_ns, each.stop_ns})
            *out++ = number;
    }
    *lost = more + static_cast<int>(all.size()) - count;
    return count;
}
void fp_tell_scale(void* plane, int index, Number step, double scale) {
    guarded([&] { of(plane)->tell_scale(index, step, scale); });
}
// What a slice's codes have left out, at the worker (-1) or a server: without the open round and
// with it, the loss's scale as the first has it, and the open round. 0: nothing.
int fp_residual(void* plane, int index, int slice, float* kept, float* tried, double* scale,
                Number* open) {
    return either(0, [&] {
        const auto state = of(plane)->residual(index, slice).get();
        std::copy(state.kept.begin(), state.kept.end(), kept);
        std::copy(state.tried.begin(), state.tried.end(), tried);
        *scale = state.scale;
        open[0] = state.open.step;
        open[1] = state.open.again;
        return !state.kept.empty();
    });
}
// `elems` of 0: nothing has been left out.
void fp_put_residual(void* plane, int index, int slice, const float* kept, Number elems,
                     double scale) {
    guarded([&] {
        const auto size = static_cast<std::size_t>(elems);
        of(plane)->put_residual(index, slice, {.kept = {kept, kept + size},
                                               .tried = std::vector<float>(size),
                                               .scale = scale});
    });
}
int fp_same_batch(void* plane, int index) {
    return either(0, [&] { return of(plane)->same_batch(index); });
}
}
