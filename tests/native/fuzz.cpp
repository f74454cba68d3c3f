// Feeds a plane what strangers might send: frames that are changed, cut, doubled, or noise.
// `fuzz SECONDS [SEED]`; the same seed gives the same bytes. test_sanitized.py compiles and runs it.
#include "planes.hpp"

using namespace testing;

namespace {

using Random = std::mt19937_64;
constexpr int ranks = 2, own = 0, peer = 1;

class Stream {
  public:
    explicit Stream(Random& random) : random_(random) {}

    std::uint64_t below(std::uint64_t most) { return random_() % most; }
    bool one_in(std::uint64_t many) { return !below(many); }

    // What a peer that behaves would send next, for most of it.
    Header expected(Kind kind, const PlaneSetting& setting, Step step) {
        const int server = kind == Kind::push ? own : peer;
        const auto number = static_cast<std::uint32_t>(below(sizes) * ranks) +
                            static_cast<std::uint32_t>(server);
        const Piece& piece = setting.slices[number];
        const std::size_t size = one_in(4) ? piece.size_bytes : piece.usual_bytes();
        const bool bare = setting.reply != Reply::broadcast && one_in(3);
        if (bare) kind = kind == Kind::push ? Kind::pull : Kind::notify;
        const bool empty = bare || one_in(8);
        const Flags flags = kind == Kind::push    ? gradient | (empty ? no_gradient : 0)
                            : kind == Kind::reply ? (empty ? unchanged : 0)
                                                  : 0;
        return {static_cast<int>(kind), static_cast<std::uint16_t>(flags), peer, step, number,
                static_cast<std::int32_t>(below(sizes)),
                static_cast<std::uint32_t>(empty ? 0 : size)};
    }
    void change(Header& header) {
        const std::uint64_t odd[] = {0, 1, 2, 3, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                     ~0ull, 1ull << 63, random_()};
        const std::uint64_t value = odd[below(std::size(odd))];
        switch (below(7)) {
            case 0: header.kind = static_cast<int>(value & 63); break;
            case 1: header.flags ^= static_cast<std::uint16_t>(1u << below(16)); break;
            case 2: header.rank = static_cast<std::uint16_t>(value); break;
            case 3: header.step = static_cast<Step>(one_in(2) ? value : header.step + 1); break;
            case 4: header.slice = static_cast<std::uint32_t>(one_in(2) ? value : below(16)); break;
            case 5: header.priority = static_cast<std::int32_t>(value); break;
            default: header.payload_bytes = static_cast<std::uint32_t>(value);
        }
    }
    // Most frames are sound, so that what follows them is looked at.
    void add(Header header, Bytes& to) {
        if (one_in(6)) header.kind = static_cast<int>(below(64));
        if (one_in(6)) change(header);
        Bytes payload(std::min<std::size_t>(header.payload_bytes, 400'000));
        for (std::size_t at = 0; at < payload.size(); at += 1 + payload.size() / 64)
            payload[at] = static_cast<std::uint8_t>(random_());
        Bytes whole(header_bytes);
        const bool is_whole = payload.size() == header.payload_bytes;
        encode_header(header, payload.data(), is_whole, whole.data());
        if (!is_whole) {  // its payload is longer than we send: the header alone is sealed
            std::uint8_t* at = whole.data() + layout_bytes + 4;
            wire_detail::put(at, crc32c(whole.data(), layout_bytes + 4));
        }
        whole.insert(whole.end(), payload.begin(), payload.end());
        if (one_in(12)) whole[below(whole.size())] ^= static_cast<std::uint8_t>(1 + below(255));
        if (one_in(40)) whole.resize(below(whole.size()));
        if (one_in(40)) whole.insert(whole.begin() + static_cast<std::ptrdiff_t>(below(whole.size())),
                                     static_cast<std::uint8_t>(random_()));
        to.insert(to.end(), whole.begin(), whole.end());
        if (one_in(20)) to.insert(to.end(), whole.begin(), whole.end());
        ++frames;
    }
    Bytes stream(Kind kind, const PlaneSetting& setting, Step step) {
        Bytes all;
        if (one_in(30)) {
            all.resize(1 + below(3000));
            for (auto& each : all) each = static_cast<std::uint8_t>(random_());
            ++frames;
        }
        for (std::uint64_t left = 1 + below(12); left; --left) add(expected(kind, setting, step), all);
        return all;
    }

    std::int64_t frames = 0;

  private:
    Random& random_;
};

// Sends it in pieces, takes what comes, and returns when the plane has done with the connection.
void feed(Plane& plane, Plane::Id id, int fd, const Bytes& data, Stream& draw) {
    std::uint8_t room[65'536];
    std::thread reader([&plane, id] {
        std::uint8_t passed[65'536];
        while (plane.read(id, passed, sizeof passed)) {
        }
    });
    for (std::size_t at = 0; at < data.size();) {
        const std::size_t piece = std::min<std::size_t>(data.size() - at, 1 + draw.below(60'000));
        const ssize_t sent = send(fd, data.data() + at, piece, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) at += static_cast<std::size_t>(sent);
        if (sent < 0 && errno != EAGAIN) break;
        while (recv(fd, room, sizeof room, MSG_DONTWAIT) > 0) {
        }
        if (plane.end_of(id).kind != End::open) break;
    }
    shutdown(fd, SHUT_WR);
    reader.join();
}

// Takes what the plane sends, until all that was pushed has left, or a fifth of a second.
void take_all(Plane& plane, int fd) {
    std::uint8_t room[65'536];
    for (int turn = 0; turn < 200 && !plane.flush(1); ++turn) {
        while (recv(fd, room, sizeof room, MSG_DONTWAIT) > 0) {
        }
    }
}

// What is still owed in this step, so that the next one can begin; whether it can.
bool settle(Plane& plane, const PlaneSetting& setting, Step step, Stream& draw) {
    Bytes pushes;
    const auto add = [&](Bytes& to, Kind kind, Flags flags, Step at, int slice) {
        const auto number = static_cast<std::uint32_t>(slice);
        const Bytes data(kind == Kind::notify ? 0 : setting.slices[number].size_bytes, 1);
        const Bytes whole = frame_of({static_cast<int>(kind), static_cast<std::uint16_t>(flags), peer,
                                      at, number, 0, static_cast<std::uint32_t>(data.size())}, data);
        to.insert(to.end(), whole.begin(), whole.end());
    };
    for (const auto& each : plane.snapshot(own)) {
        if (each.done.step < step && !each.pushed.contains(peer))
            add(pushes, Kind::push, gradient, step, each.slice);
    }
    const auto answers = [&](Kind kind, Flags flags) {
        Bytes all;
        for (int parameter = 0; parameter < sizes; ++parameter) {
            for (const auto& [slice, left] : plane.missing(parameter)) {
                if (left && setting.slices[static_cast<std::size_t>(slice)].server == peer)
                    add(all, kind, flags, plane.step_of(parameter), slice);
            }
        }
        return all;
    };
    const Pair to_server, to_worker;
    const Plane::Id server = plane.adopt(Plane::server, own, to_server.ends[0]);
    const Plane::Id worker = plane.adopt(Plane::worker, -1, to_worker.ends[0]);
    plane.carry(server, peer);
    plane.carry(worker, peer);
    feed(plane, server, to_server.ends[1], pushes, draw);
    plane.pulls_due();
    if (setting.reply == Reply::notify) {  // which answers what had no gradient
        const Pair before;
        const Plane::Id first = plane.adopt(Plane::worker, -1, before.ends[0]);
        plane.carry(first, peer);
        feed(plane, first, before.ends[1], answers(Kind::notify, unchanged), draw);
        plane.release(first);
        close(before.ends[1]);
        plane.carry(worker, peer);
    }
    take_all(plane, to_worker.ends[1]);
    feed(plane, worker, to_worker.ends[1], answers(Kind::reply, 0), draw);
    bool all = true;
    for (int each = 0; each < sizes; ++each) all = plane.wait(each, 20) && all;
    for (Plane::Id id : {server, worker}) plane.release(id);
    for (const Pair& each : {to_server, to_worker}) close(each.ends[1]);
    return all;
}

// One world: rank 0 and its server are the plane, rank 1 and its server are what we send. A
// gradient's memory goes as soon as the plane says that it may, which a sanitizer would see.
int run_world(Stream& draw) {
    const auto reply = static_cast<Reply>(draw.below(3));
    const PlaneSetting setting =
        setting_of(own, ranks, reply, random() % 2 ? Codec::int8 : Codec::int4);
    std::vector<Bytes> gradients(sizes), results(sizes);
    Plane plane(setting);
    for (Step step = 1; step <= 8; ++step) {
        alarm(120);  // a plane that hangs has failed
        const Pair to_server, to_worker;
        const Plane::Id server = plane.adopt(Plane::server, own, to_server.ends[0]);
        const Plane::Id worker = plane.adopt(Plane::worker, -1, to_worker.ends[0]);
        plane.carry(server, peer);
        plane.carry(worker, peer);
        if (draw.one_in(8)) plane.tell_begins(own);
        for (int each = 0; each < sizes; ++each) {
            gradients[each] = Bytes(bytes_of(setting, each), 63);
            results[each] = Bytes(gradients[each].size());
            plane.push(each, step, gradient, gradients[each].data(), results[each].data());
        }
        feed(plane, worker, to_worker.ends[1], draw.stream(Kind::reply, setting, step), draw);
        if (!draw.one_in(4)) take_all(plane, to_worker.ends[1]);
        for (int each = 0; each < sizes; ++each) {
            if (plane.is_complete(each)) gradients[each] = results[each] = {};
        }
        feed(plane, server, to_server.ends[1], draw.stream(Kind::push, setting, step), draw);
        for (Plane::Id id : {server, worker}) plane.release(id);
        for (const Pair& each : {to_server, to_worker}) close(each.ends[1]);
        if (!settle(plane, setting, step, draw)) return static_cast<int>(step);
    }
    return 8;
}

}  // namespace

int main(int count, char** arguments) {
    const int seconds = count > 1 ? std::atoi(arguments[1]) : 5;
    Random random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
    Stream draw(random);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    int worlds = 0, steps = 0;
    do {
        steps += run_world(draw);
        ++worlds;
    } while (std::chrono::steady_clock::now() < until);
    std::printf("%lld frames fed to %d planes in %d steps\n", static_cast<long long>(draw.frames),
                worlds, steps);
}
