/* The four verbs that touch the activation, and Newton's iteration between them, for one floating-point type:
   -DREAL=float or -DREAL=double.

   An activation is planes [N, C, L], positions contiguous, or rows [N, L, C], channels contiguous. Tiles of it are
   packed into a thread's own workspace: packing subtracts a shift for nothing, evens out lengths with zeros, and takes
   rows that lie a power of two apart off the same cache sets. Sums are made over chunks of positions and joined in double
   precision in the order of the chunks; the chunks do not depend on the number of threads, so neither do the results.
   Matrices are [G, d, d]; what a smaller last group leaves free is not read, and written as zero.

   There are no intrinsics: the vectors are those of GCC and clang, at the width of the machine. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
/* Whether there are 32 vector registers, for 24 sums and their operands, or 16 for half of that. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define MANY_REGISTERS 1
#else
#define MANY_REGISTERS 0
#endif

#define INLINE static inline __attribute__((always_inline))
/* Sums stay in registers only where the loops over them are unrolled early; clang takes GCC's request for a late one. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define API __attribute__((visibility("default")))
#define W ((long)(VECTOR_BYTES / sizeof(REAL)))
#define LINE ((long)(64 / sizeof(REAL)))

typedef REAL V __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* GCC would read an operand again at each use, and then loads would bound the loops, not products. */
#if defined(__x86_64__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v) ((void)0)
#endif

INLINE V load(const REAL *p) { return (V) * (const Unaligned *)p; }
INLINE void store(REAL *p, V v) { *(Unaligned *)p = (Unaligned)v; }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }
INLINE long whole(long n, long step) { return (n + step - 1) / step * step; }

/* A store past the caches, to the address of a whole vector. */
INLINE void stream(REAL *p, V v) {
#if defined(__clang__)
  __builtin_nontemporal_store(v, (V *)p);
#elif defined(__AVX512F__)
  typedef long long Bits __attribute__((vector_size(64)));
  __builtin_ia32_movntdq512((Bits *)p, (Bits)v);
#else
  store(p, v);
#endif
}

/* Streamed stores must have arrived before another thread is told that they have. */
INLINE void fence(void) {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

/* The threads are those of the OpenMP that torch has loaded, by the function that GCC's pragmas call. LLVM's and Intel's
   libraries have it too; clang's own pragmas need theirs. */
extern void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void);

typedef struct {
  void (*work)(const void *task, long item, long thread);
  const void *task;
  long total, turn, next;
} Loop;

static void take_turns(void *data) {
  Loop *loop = data;
  long thread = omp_get_thread_num(), first;
  while ((first = __atomic_fetch_add(&loop->next, loop->turn, __ATOMIC_RELAXED)) < loop->total)
    for (long item = first; item < least(first + loop->turn, loop->total); item++) loop->work(loop->task, item, thread);
  fence();
}

/* work(task, item, thread) for each item, `turn` neighbours at once to the thread that asks next. */
static void parallel(long threads, long total, long turn, void (*work)(const void *, long, long), const void *task) {
  Loop loop = {work, task, total, turn, 0};
  GOMP_parallel(take_turns, &loop, (unsigned)threads, 0);
}

typedef struct {
  long samples, channels, length, group_size;
  int rows, threads;
} Shape;

/* A block of dot products, in rows and columns, and what groups are padded to. */
enum { DOT_ROWS = 4, DOT_COLUMNS = MANY_REGISTERS ? 4 : 2 };

static long num_groups(const Shape *s) { return (s->channels + s->group_size - 1) / s->group_size; }
static long num_positions(const Shape *s) { return s->samples * s->length; }
static long padded(const Shape *s) { return whole(s->group_size, s->rows ? most(W, 8) : DOT_ROWS); }
static long width_of(const Shape *s, long group) { return least(s->group_size, s->channels - group * s->group_size); }

/* The positions of a tile. Long rows of positions make the sum across the lanes of a vector cheap, and a tile of them is
   to stay in the second-level cache; one of rows of channels in the first. */
static long tile_length(const Shape *s) {
  return s->rows ? 64 : most(128, least(512, (1 << 18) / (long)sizeof(REAL) / padded(s) / 64 * 64));
}

/* Sixteen chunks of a group or more, for as many threads, as long as their matrices are small beside the activation:
   a thirty-second of it where there are many positions, a quarter where there are few. */
static long chunk_length(const Shape *s) {
  long share = least(32 * s->group_size, most(4 * s->group_size, num_positions(s) / 16));
  return whole(most(1024, share), tile_length(s));
}
static long num_chunks(const Shape *s) { return (num_positions(s) + chunk_length(s) - 1) / chunk_length(s); }

/* One line more than the positions: rows must not lie a power of two apart. */
static long tile_stride(const Shape *s) { return s->rows ? padded(s) : tile_length(s) + LINE; }
static long tile_reals(const Shape *s) { return (s->rows ? tile_length(s) : padded(s)) * whole(tile_stride(s), LINE); }

/* What a chunk leaves of a group: the matrix, the sums, the pilot. */
static long partial_reals(const Shape *s) { return whole(padded(s) * (padded(s) + 2), LINE); }

/* Where a position of planes begins, from the start of a group; the last one for those behind it. */
INLINE long offset_of(const Shape *s, long position) {
  long inside = least(position, num_positions(s) - 1);
  return inside / s->length * s->channels * s->length + inside % s->length;
}

/* The runs of contiguous positions in `count` of planes from x + `offset` on, `inside` a plane: `run` of them at x + `at`,
   `done` before. */
#define FOR_EACH_RUN(s, offset, inside, count) \
  for (long done = 0, run, at = (offset), begun = (inside); \
       done < (count) && (run = least((s)->length - begun, (count)-done), 1); \
       done += run, at += (s)->channels * (s)->length - begun, begun = 0)

/* Planes as [d, tile_stride], with zeros up to whole vectors and up to whole blocks of channels. */
static void pack_planes(const Shape *s, const REAL *x, long width, long first, long count, const REAL *shift,
                        REAL *sums, REAL *tile) {
  long end = whole(count, W), offset = offset_of(s, first), inside = first % s->length;
  for (long c = 0; c < padded(s); c++) {
    REAL *row = tile + c * tile_stride(s), rest = 0, by = shift && c < width ? shift[c] : 0;
    V sum = {0};
    if (c >= width) {
      memset(row, 0, end * sizeof(REAL));
      continue;
    }
    FOR_EACH_RUN(s, offset, inside, count) {
      const REAL *from = x + c * s->length + at;
      long i = 0;
      for (; i + W <= run; i += W) {
        V v = load(from + i) - by;
        sum += v;
        store(row + done + i, v);
      }
      for (; i < run; i++) rest += row[done + i] = from[i] - by;
    }
    for (long i = count; i < end; i++) row[i] = 0;
    for (long i = 0; i < W; i++) rest += sum[i];
    if (sums) sums[c] += rest;
  }
}

/* Some vectors of channels of rows, as they are or, one by one, filled up with zeros to a whole vector. */
INLINE void pack_columns(const Shape *s, const REAL *x, long count, const REAL *shift, REAL *sums, REAL *tile,
                         const int vectors, const int whole_vector, long lanes) {
  V by[4], sum[4];
  REAL values[4 * W] = {0};
  if (shift) memcpy(values, shift, lanes * sizeof(REAL));
  UNROLL for (int j = 0; j < vectors; j++) by[j] = load(values + j * W), sum[j] = (V){0};
  for (long p = 0; p < count; p++) {
    const REAL *from = x + p * s->channels;
    REAL *to = tile + p * padded(s);
    if (!whole_vector) {
      for (long i = 0; i < W; i++) values[i] = i < lanes ? from[i] : 0;
      from = values;
    }
    UNROLL for (int j = 0; j < vectors; j++) {
      V v = load(from + j * W) - by[j];
      sum[j] += v;
      *(V *)(to + j * W) = v;
    }
  }
  UNROLL for (int j = 0; j < vectors; j++) store(values + j * W, sum[j]);
  for (long i = 0; sums && i < lanes; i++) sums[i] += values[i];
}

/* Rows as [count, d], with zeros up to whole vectors of channels. */
static void pack_rows(const Shape *s, const REAL *x, long width, long first, long count, const REAL *shift, REAL *sums,
                      REAL *tile) {
  long size = padded(s), step;
  for (long c = 0; c < size; c += step) {
    const REAL *from = x + first * s->channels + c, *by = shift ? shift + c : NULL;
    REAL *total = sums ? sums + c : NULL, *to = tile + c;
    step = c + 4 * W <= width ? 4 * W : W;
    if (c + 4 * W <= width) pack_columns(s, from, count, by, total, to, 4, 1, 4 * W);
    else if (c + W <= width) pack_columns(s, from, count, by, total, to, 1, 1, W);
    else pack_columns(s, from, count, by, total, to, 1, 0, most(0, width - c));
  }
}

/* Where a group of an activation begins. */
INLINE const REAL *group_of(const Shape *s, const REAL *x, long group) {
  return x + group * s->group_size * (s->rows ? 1 : s->length);
}

static void pack(const Shape *s, const REAL *x, long group, long first, long count, const REAL *shift, REAL *sums,
                 REAL *tile) {
  (s->rows ? pack_rows : pack_planes)(s, group_of(s, x, group), width_of(s, group), first, count, shift, sums, tile);
}

/* Lanes of u and then of v, by number. GCC has the name that clang gives it only since version 12. */
#if defined(__clang__)
#define LANES(u, v, ...) __builtin_shufflevector(u, v, __VA_ARGS__)
#else
#if REAL_BYTES == 4
typedef int32_t Numbers __attribute__((vector_size(VECTOR_BYTES)));
#else
typedef int64_t Numbers __attribute__((vector_size(VECTOR_BYTES)));
#endif
#define LANES(u, v, ...) __builtin_shuffle(u, v, (Numbers){__VA_ARGS__})
#endif

/* The sums of neighbouring lanes, of u and then of v. */
INLINE V fold(V u, V v) {
#if VECTOR_BYTES / REAL_BYTES == 16
  return LANES(u, v, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         LANES(u, v, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif VECTOR_BYTES / REAL_BYTES == 8
  return LANES(u, v, 0, 2, 4, 6, 8, 10, 12, 14) + LANES(u, v, 1, 3, 5, 7, 9, 11, 13, 15);
#elif VECTOR_BYTES / REAL_BYTES == 4
  return LANES(u, v, 0, 2, 4, 6) + LANES(u, v, 1, 3, 5, 7);
#else
  return LANES(u, v, 0, 2) + LANES(u, v, 1, 3);
#endif
}

/* matrix += the dot products of a block of rows of two tiles of planes. `next` is what will be packed soon. */
static void dots(const REAL *a, const REAL *b, long stride, long length, REAL *matrix, long size, const REAL *next) {
  V sums[DOT_ROWS * DOT_COLUMNS] = {{0}};
  for (long p = 0; p < length; p += W) {
    V left[DOT_ROWS];
    __builtin_prefetch(next + p / 2);
    for (int i = 0; i < DOT_ROWS; i++) {
      left[i] = *(const V *)(a + i * stride + p);
      KEEP(left[i]);
    }
    for (int j = 0; j < DOT_COLUMNS; j++) {
      V right = *(const V *)(b + j * stride + p);
      KEEP(right);
      for (int i = 0; i < DOT_ROWS; i++) sums[i * DOT_COLUMNS + j] += left[i] * right;
    }
  }
  /* Fold until each lane is the sum of one vector. */
  UNROLL for (int level = 1; level < W; level *= 2)
    UNROLL for (int i = 0; i < DOT_ROWS * DOT_COLUMNS / 2 / level; i++) sums[i] = fold(sums[2 * i], sums[2 * i + 1]);
  REAL values[DOT_ROWS * DOT_COLUMNS];
  memcpy(values, sums, sizeof(values));
  for (int i = 0; i < DOT_ROWS; i++)
    for (int j = 0; j < DOT_COLUMNS; j++) matrix[i * size + j] += values[i * DOT_COLUMNS + j];
}

/* matrix += the sum over positions of outer products of a block of channels of two tiles of rows. */
INLINE void outer(const REAL *a, const REAL *b, long size, long length, REAL *matrix, const int rows, const int vectors) {
  V sums[8][4];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < vectors; j++) sums[i][j] = (V){0};
  for (long p = 0; p < length; p++) {
    V right[4];
    for (int j = 0; j < vectors; j++) {
      right[j] = *(const V *)(b + p * size + j * W);
      KEEP(right[j]);
    }
    for (int i = 0; i < rows; i++) {
      V left = a[p * size + i] - (V){0};
      KEEP(left);
      for (int j = 0; j < vectors; j++) sums[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < vectors; j++) {
      REAL *to = matrix + i * size + j * W;
      store(to, load(to) + sums[i][j]);
    }
}

/* matrix += the products of two tiles of rows; of a symmetric one only what is on or above the diagonal, and more. */
static void outer_products(const REAL *a, const REAL *b, long size, long length, REAL *matrix, int symmetric) {
  long step = (MANY_REGISTERS ? 4 : 2) * W;
  /* The columns outside: they stay in the first-level cache while the rows go by. */
  for (long from = 0; from < size; from += step) {
    long to = least(from + step, size);
    for (long i = 0; i < (symmetric ? to : size); i += 8) {
      long j = symmetric ? most(from, i / W * W) : from;
      const REAL *left = a + i, *right = b + j;
      REAL *place = matrix + i * size + j;
      switch ((to - j) / W) {
#if MANY_REGISTERS
        case 4:
          outer(left, right, size, length, place, 4, 4);
          outer(left + 4, right, size, length, place + 4 * size, 4, 4);
          break;
        case 3: outer(left, right, size, length, place, 8, 3); break;
        case 2: outer(left, right, size, length, place, 8, 2); break;
        case 1: outer(left, right, size, length, place, 8, 1); break;
#else
        case 2:
          outer(left, right, size, length, place, 4, 2);
          outer(left + 4, right, size, length, place + 4 * size, 4, 2);
          break;
        case 1: outer(left, right, size, length, place, 8, 1); break;
#endif
      }
    }
  }
}

/* matrix += the products of two tiles of planes, `first` being the position of the tile that follows. */
static void dot_products(const Shape *s, const REAL *y, const REAL *x, long group, long first, const REAL *a,
                         const REAL *b, long length, REAL *matrix) {
  long size = padded(s), stride = tile_stride(s), row = 0, half = 0, end = whole(length, W);
  /* Each block of products fetches half a row of the tile that follows, of x and then of y; any address will do. */
  const REAL *next = group_of(s, x, group) + offset_of(s, first);
  const REAL *after = group_of(s, y, group) + offset_of(s, first);
  /* Two blocks of rows at a time: what they are multiplied with comes from the second-level cache once for both. */
  for (long i = 0; i < size; i += 2 * DOT_ROWS)
    for (long j = a == b ? i : 0; j < size; j += DOT_COLUMNS)
      for (long k = i; k < least(i + 2 * DOT_ROWS, size); k += DOT_ROWS) {
        if (a == b && j + DOT_COLUMNS <= k) continue;
        dots(a + k * stride, b + j * stride, stride, end, matrix + k * size + j, size, next + row * s->length + half);
        half = half ? 0 : tile_length(s) / 2;
        row += !half;
        if (row == size) row = 0, next = after;
      }
}

/* How many of so many pieces of work a thread takes at once: neighbours, so that what is fetched ahead is its own. */
static long a_turn(const Shape *s, long total) { return most(1, least(8, total / (8 * s->threads))); }

/* And of pieces that all take the same time. */
static long a_share(const Shape *s, long total) { return (total + s->threads - 1) / s->threads; }

/* How many threads so many operations are for. What takes less than a tenth of a millisecond stays with the caller: a
   region of several threads ends when all have begun, and one whose core is taken begins milliseconds later. */
static long crew(long threads, long operations) { return most(1, least(threads, operations >> 19)); }

/* No more threads than there is work for: each has tiles of its own. */
static long team(const Shape *s) { return least(s->threads, num_groups(s) * num_chunks(s)); }

/* The bytes that moments and cross_moments need. */
API long sums_workspace(const Shape *s) {
  return sizeof(REAL) * (num_groups(s) * num_chunks(s) * partial_reals(s) + team(s) * 2 * tile_reals(s)) +
         sizeof(double) * (s->channels + s->threads * padded(s));
}

/* The sums of y and x - mean, or where there is no y of x about a pilot: first of each chunk, then of all. */
typedef struct {
  const Shape *shape;
  const REAL *y, *x, *mean;
  REAL *partials, *tiles, *total, *matrix;
  double *exact_mean, *rows;
} Sums;

static Sums lay_out(const Shape *s, char *workspace) {
  Sums sums = {.shape = s, .partials = (REAL *)workspace};
  sums.tiles = sums.partials + num_groups(s) * num_chunks(s) * partial_reals(s);
  sums.exact_mean = (double *)(sums.tiles + team(s) * 2 * tile_reals(s));
  sums.rows = sums.exact_mean + s->channels;
  return sums;
}

static void sum_chunk(const void *task, long item, long thread) {
  const Sums *t = task;
  const Shape *s = t->shape;
  const REAL *y = t->y, *x = t->x;
  long size = padded(s), chunks = num_chunks(s), groups = num_groups(s);
  /* Groups lie side by side in rows: they follow each other while the rows are in the cache. */
  long group = s->rows ? item % groups : item / chunks, chunk = s->rows ? item / groups : item % chunks;
  long start = chunk * chunk_length(s), stop = least(start + chunk_length(s), num_positions(s));
  REAL *matrix = t->partials + (group * chunks + chunk) * partial_reals(s);
  REAL *sums = matrix + size * size, *pilot = sums + size;
  REAL *left = t->tiles + thread * 2 * tile_reals(s), *right = y ? left + tile_reals(s) : left;
  const REAL *shift = y ? t->mean + group * s->group_size : pilot;
  memset(matrix, 0, partial_reals(s) * sizeof(REAL));
  if (!y) {
    /* Whatever the data, a mean of an eighth of the chunk is off by less than three deviations of the chunk. */
    long count = least(chunk_length(s) / 8, stop - start);
    for (long first = 0; first < count; first += tile_length(s))
      pack(s, x, group, start + first, least(tile_length(s), count - first), NULL, pilot, left);
    for (long c = 0; c < size; c++) pilot[c] /= count;
  }
  for (long first = start; first < stop; first += tile_length(s)) {
    long count = least(tile_length(s), stop - first);
    if (y) pack(s, y, group, first, count, NULL, sums, left);
    pack(s, x, group, first, count, shift, y ? NULL : sums, right);
    if (s->rows) outer_products(left, right, size, count, matrix, !y);
    else dot_products(s, y ? y : x, x, group, first + tile_length(s), left, right, count, matrix);
  }
}

static void sum_chunks(const Sums *sums) {
  const Shape *s = sums->shape;
  long total = num_groups(s) * num_chunks(s);
  parallel(team(s), total, a_turn(s, total), sum_chunk, sums);
}

/* A row of the covariance, from the diagonal on. With e = mean - pilot, Σ (x - mean)(x - mean)ᵀ = S - s eᵀ - e sᵀ + n e eᵀ
   for each chunk. */
static void covariance_row(const void *task, long row, long thread) {
  const Sums *t = task;
  const Shape *s = t->shape;
  long size = padded(s), chunks = num_chunks(s), d = s->group_size;
  long group = row / d, i = row % d, width = width_of(s, group);
  REAL *to = t->matrix + row * d;
  double *sum = t->rows + thread * size;
  for (long j = 0; j < d; j++) to[j] = 0, sum[j] = 0;
  for (long chunk = 0; chunk < chunks && i < width; chunk++) {
    const REAL *matrix = t->partials + (group * chunks + chunk) * partial_reals(s), *sums = matrix + size * size;
    const REAL *pilot = sums + size;
    const double *average = t->exact_mean + group * d;
    double count = least(chunk_length(s), num_positions(s) - chunk * chunk_length(s));
    double shift = average[i] - pilot[i], mine = sums[i];
    for (long j = i; j < width; j++) {
      double e = average[j] - pilot[j];
      sum[j] += matrix[i * size + j] - mine * e + shift * (count * e - sums[j]);
    }
  }
  for (long j = i; j < width; j++) to[j] = (REAL)(sum[j] / num_positions(s));
}

/* Mean [C] and biased covariance [G, d, d]. */
API void moments(const Shape *s, const REAL *x, char *workspace, REAL *mean, REAL *covariance) {
  long size = padded(s), chunks = num_chunks(s), d = s->group_size, rows = num_groups(s) * d;
  Sums sums = lay_out(s, workspace);
  sums.x = x, sums.matrix = covariance;
  sum_chunks(&sums);
  for (long c = 0; c < s->channels; c++) {
    double sum = 0;
    for (long chunk = 0; chunk < chunks; chunk++) {
      const REAL *of_chunk = sums.partials + (c / d * chunks + chunk) * partial_reals(s) + size * size;
      double count = least(chunk_length(s), num_positions(s) - chunk * chunk_length(s));
      sum += of_chunk[c % d] + of_chunk[size + c % d] * count;
    }
    sums.exact_mean[c] = sum / num_positions(s);
    mean[c] = (REAL)sums.exact_mean[c];
  }
  parallel(crew(s->threads, rows * d * chunks), rows, a_share(s, rows), covariance_row, &sums);
  for (long row = 0; row < rows; row++)
    for (long j = 0; j < row % d; j++) covariance[row * d + j] = covariance[(row - row % d + j) * d + row % d];
}

static void cross_row(const void *task, long row, long thread) {
  const Sums *t = task;
  const Shape *s = t->shape;
  long size = padded(s), chunks = num_chunks(s), d = s->group_size;
  long group = row / d, i = row % d, width = i < width_of(s, group) ? width_of(s, group) : 0;
  double *sum = t->rows + thread * size, all = 0;
  for (long j = 0; j < d; j++) sum[j] = 0;
  for (long chunk = 0; chunk < chunks && width; chunk++) {
    const REAL *matrix = t->partials + (group * chunks + chunk) * partial_reals(s);
    for (long j = 0; j < width; j++) sum[j] += matrix[i * size + j];
    all += matrix[size * size + i];
  }
  for (long j = 0; j < d; j++) t->matrix[row * d + j] = (REAL)sum[j];
  if (width) t->total[group * d + i] = (REAL)all;
}

/* Σ y [C] and Σ y (x - mean)ᵀ [G, d, d]. */
API void cross_moments(const Shape *s, const REAL *y, const REAL *x, const REAL *mean, char *workspace, REAL *total,
                       REAL *cross) {
  long d = s->group_size, rows = num_groups(s) * d;
  Sums sums = lay_out(s, workspace);
  sums.y = y, sums.x = x, sums.mean = mean, sums.total = total, sums.matrix = cross;
  sum_chunks(&sums);
  parallel(crew(s->threads, rows * d * num_chunks(s)), rows, a_share(s, rows), cross_row, &sums);
}

/* A block of the maps: channels by vectors of positions for planes, positions by vectors of channels for rows. */
enum {
  PLANE_CHANNELS = 4,
  PLANE_VECTORS = MANY_REGISTERS ? 6 : 2,
  ROW_POSITIONS = MANY_REGISTERS ? 6 : 4,
  ROW_VECTORS = MANY_REGISTERS ? 4 : 2,
};

/* Outputs above this many bytes are stored past the caches: they would not stay there until somebody reads them. */
enum { STREAMED_BYTES = 1 << 23 };

typedef struct {
  const REAL *inputs[2], *matrices[2];
  int count;
} Terms;

static long map_tile(const Shape *s) { return s->rows ? ROW_VECTORS * W : PLANE_VECTORS * W; }
static long map_matrix_reals(const Shape *s, long count) { return whole(count * s->group_size * padded(s), LINE); }
static long map_scratch_reals(const Shape *s, long count) {
  return (s->rows ? 0 : count * s->group_size * map_tile(s)) + 8 * map_tile(s);
}

/* The bytes that map needs. */
API long map_workspace(const Shape *s, long count) {
  return sizeof(REAL) * (num_groups(s) * (map_matrix_reals(s, count) + whole(padded(s), LINE)) +
                         s->threads * whole(map_scratch_reals(s, count), LINE));
}

/* The matrices side by side, [k, d], for planes in blocks of channels, [d / 4, k, 4]; and the offset. Zeros fill up. */
static void pack_matrix(const Shape *s, const Terms *terms, const REAL *offset, long group, REAL *matrix, REAL *start) {
  long d = s->group_size, width = width_of(s, group), size = padded(s), depth = terms->count * d;
  memset(matrix, 0, depth * size * sizeof(REAL));
  for (long i = 0; i < size; i++) start[i] = i < width ? offset[group * d + i] : 0;
  for (long term = 0; term < terms->count; term++)
    for (long i = 0; i < width; i++)
      for (long j = 0; j < width; j++) {
        long k = term * d + j;
        REAL value = terms->matrices[term][(group * d + i) * d + j];
        if (s->rows) matrix[k * size + i] = value;
        else matrix[i / PLANE_CHANNELS * depth * PLANE_CHANNELS + k * PLANE_CHANNELS + i % PLANE_CHANNELS] = value;
      }
}

/* Channels of planes: out[i, p] = start[i] + Σ_k matrix[k, i] tile[k, p]. */
INLINE void plane_block(const REAL *matrix, const REAL *tile, long depth, const REAL *start, REAL *out, long stride,
                        const int vectors, const int streamed) {
  V sums[PLANE_CHANNELS][PLANE_VECTORS];
  UNROLL for (int i = 0; i < PLANE_CHANNELS; i++)
    UNROLL for (int j = 0; j < vectors; j++) sums[i][j] = start[i] - (V){0};
  for (long k = 0; k < depth; k++) {
    V right[PLANE_VECTORS];
    UNROLL for (int j = 0; j < vectors; j++) {
      right[j] = *(const V *)(tile + k * PLANE_VECTORS * W + j * W);
      KEEP(right[j]);
    }
    UNROLL for (int i = 0; i < PLANE_CHANNELS; i++) {
      V left = matrix[k * PLANE_CHANNELS + i] - (V){0};
      KEEP(left);
      UNROLL for (int j = 0; j < vectors; j++) sums[i][j] += left * right[j];
    }
  }
  UNROLL for (int i = 0; i < PLANE_CHANNELS; i++)
    UNROLL for (int j = 0; j < vectors; j++) (streamed ? stream : store)(out + i * stride + j * W, sums[i][j]);
}

static void plane_blocks(const REAL *matrix, const REAL *tile, long depth, const REAL *start, REAL *out, long stride,
                         long vectors, int streamed) {
#define CASE(n) \
  case n: \
    if (streamed) plane_block(matrix, tile, depth, start, out, stride, n, 1); \
    else plane_block(matrix, tile, depth, start, out, stride, n, 0); \
    break;
  switch (vectors) {
    CASE(1)
    CASE(2)
#if MANY_REGISTERS
    CASE(3)
    CASE(4)
    CASE(5)
    CASE(6)
#endif
  }
#undef CASE
}

/* One tile of planes, positions [first, first + count) of one group, all its channels. */
static void map_plane_tile(const Shape *s, const Terms *terms, long group, long first, long count, const REAL *matrix,
                           const REAL *start, REAL *tile, REAL *result, REAL *out, int streamed) {
  long d = s->group_size, width = width_of(s, group), depth = terms->count * d, step = PLANE_VECTORS * W;
  long at_first = offset_of(s, first), at_next = offset_of(s, first + count);
  long inside = first % s->length, together = inside + count <= s->length, full = together && count == step;
  REAL *to = (REAL *)group_of(s, out, group);
  for (long term = 0; term < terms->count; term++) {
    const REAL *from = group_of(s, terms->inputs[term], group);
    for (long c = 0; c < d; c++) {
      REAL *row = tile + (term * d + c) * step;
      if (c < width && full) {
        const REAL *plane = from + at_first + c * s->length;
        for (int j = 0; j < PLANE_VECTORS; j++) *(V *)(row + j * W) = load(plane + j * W);
        continue;
      }
      memset(row, 0, whole(count, W) * sizeof(REAL));
      if (c < width)
        FOR_EACH_RUN(s, at_first, inside, count) memcpy(row + done, from + c * s->length + at, run * sizeof(REAL));
    }
  }
  for (long c = 0; c < width; c += PLANE_CHANNELS) {
    REAL *place = to + at_first + c * s->length;
    int whole_block = together && count % W == 0 && c + PLANE_CHANNELS <= width;
    /* The tile that follows; any address will do. */
    for (long term = 0; term < terms->count; term++)
      for (long i = 0; i < PLANE_CHANNELS; i++)
        for (long j = 0; j < PLANE_VECTORS; j++)
          __builtin_prefetch(group_of(s, terms->inputs[term], group) + at_next + (c + i) * s->length + j * W);
    plane_blocks(matrix + c * depth, tile, depth, start + c, whole_block ? place : result, whole_block ? s->length : step,
                 whole(count, W) / W, whole_block && streamed);
    for (long i = 0; !whole_block && i < least(PLANE_CHANNELS, width - c); i++)
      FOR_EACH_RUN(s, at_first, inside, count)
        memcpy(to + (c + i) * s->length + at, result + i * step + done, run * sizeof(REAL));
  }
}

/* Positions of rows: out[p, i] = start[i] + Σ_k inputs[p, k] matrix[k, i]. */
INLINE void row_block(const Shape *s, const Terms *terms, long channel, long width, long first, const REAL *matrix,
                      long size, const REAL *start, REAL *out, long stride, const int rows, const int vectors,
                      const int streamed) {
  V sums[ROW_POSITIONS][ROW_VECTORS];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < vectors; j++) sums[i][j] = load(start + j * W);
  for (int term = 0; term < terms->count; term++) {
    const REAL *left = terms->inputs[term] + first * s->channels + channel;
    const REAL *of_term = matrix + term * s->group_size * size;
    for (long k = 0; k < width; k++) {
      V right[ROW_VECTORS];
      for (int j = 0; j < vectors; j++) {
        right[j] = *(const V *)(of_term + k * size + j * W);
        KEEP(right[j]);
      }
      for (int i = 0; i < rows; i++) {
        V value = left[i * s->channels + k] - (V){0};
        KEEP(value);
        for (int j = 0; j < vectors; j++) sums[i][j] += value * right[j];
      }
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < vectors; j++) (streamed ? stream : store)(out + i * stride + j * W, sums[i][j]);
}

/* Positions [first, first + count) of rows, of one group. */
static void map_row_tile(const Shape *s, const Terms *terms, long group, long first, long count, const REAL *matrix,
                         const REAL *start, REAL *result, REAL *out, int streamed) {
  long channel = group * s->group_size, width = width_of(s, group), size = padded(s);
  for (long j = 0; j < width; j += ROW_VECTORS * W) {
    long vectors = least(ROW_VECTORS, (size - j) / W), columns = least(vectors * W, width - j);
    for (long p = first; p < first + count;) {
      int direct = columns == vectors * W, rows = p + ROW_POSITIONS <= first + count ? ROW_POSITIONS : 1;
      REAL *place = out + p * s->channels + channel + j, *to = direct ? place : result;
      long stride = direct ? s->channels : ROW_VECTORS * W;
#define BLOCK(r, v, t) \
  row_block(s, terms, channel, width, p, matrix + j, size, start + j, to, stride, r, v, t)
#define CASE(v) \
  case v: \
    if (rows == 1) BLOCK(1, v, 0); \
    else if (streamed && direct) BLOCK(ROW_POSITIONS, v, 1); \
    else BLOCK(ROW_POSITIONS, v, 0); \
    break;
      switch (vectors) {
        CASE(1)
        CASE(2)
#if MANY_REGISTERS
        CASE(3)
        CASE(4)
#endif
      }
#undef CASE
#undef BLOCK
      for (long i = 0; !direct && i < rows; i++)
        memcpy(place + i * s->channels, result + i * ROW_VECTORS * W, columns * sizeof(REAL));
      p += rows;
    }
  }
}

typedef struct {
  const Shape *shape;
  const Terms *terms;
  const REAL *offset;
  REAL *matrices, *starts, *scratch, *out;
  long step, stretch, stretches, piece, pieces;
  int streamed;
} Map;

static long start_reals(const Shape *s) { return whole(padded(s), LINE); }

static void pack_group(const void *task, long group, long thread) {
  const Map *t = task;
  const Shape *s = t->shape;
  (void)thread;
  pack_matrix(s, t->terms, t->offset, group, t->matrices + group * map_matrix_reals(s, t->terms->count),
              t->starts + group * start_reals(s));
}

static void map_piece(const void *task, long item, long thread) {
  const Map *t = task;
  const Shape *s = t->shape;
  long groups = num_groups(s), parts = t->stretches * t->pieces;
  long group = s->rows ? item % groups : item / parts, part = s->rows ? item / groups : item % parts;
  long start = part / t->pieces * t->stretch, first = part % t->pieces * t->piece;
  long stop = least(first + t->piece, t->stretch);
  const REAL *matrix = t->matrices + group * map_matrix_reals(s, t->terms->count);
  const REAL *offsets = t->starts + group * start_reals(s);
  REAL *result = t->scratch + thread * whole(map_scratch_reals(s, t->terms->count), LINE);
  REAL *tile = result + 8 * map_tile(s);
  for (; first < stop; first += t->step) {
    long at = start + first, count = least(t->step, stop - first);
    if (s->rows) map_row_tile(s, t->terms, group, at, count, matrix, offsets, result, t->out, t->streamed);
    else map_plane_tile(s, t->terms, group, at, count, matrix, offsets, tile, result, t->out, t->streamed);
  }
}

/* out = Σ matrices inputs + offset for each group, one or two terms; all laid out alike. */
API void map(const Shape *s, const Terms *terms, const REAL *offset, char *workspace, REAL *out) {
  long groups = num_groups(s);
  Map map = {.shape = s, .terms = terms, .offset = offset, .out = out, .matrices = (REAL *)workspace};
  map.starts = map.matrices + groups * map_matrix_reals(s, terms->count);
  map.scratch = map.starts + groups * start_reals(s);
  /* Planes that are long enough are cut into tiles one by one, short ones together. */
  map.step = s->rows ? 32 * ROW_POSITIONS : map_tile(s);
  map.stretch = !s->rows && s->length >= map.step ? s->length : num_positions(s);
  map.stretches = num_positions(s) / map.stretch;
  map.piece = s->rows ? map.step : 10 * map.step;
  map.pieces = (map.stretch + map.piece - 1) / map.piece;
  map.streamed = s->samples * s->channels * s->length * (long)sizeof(REAL) >= STREAMED_BYTES &&
                 (uintptr_t)out % VECTOR_BYTES == 0 && (s->rows ? s->channels : s->length) % W == 0 &&
                 (!s->rows || s->group_size % W == 0);
  long total = groups * map.stretches * map.pieces;
  parallel(crew(s->threads, groups * map_matrix_reals(s, terms->count)), groups, a_share(s, groups), pack_group, &map);
  parallel(s->threads, total, a_turn(s, total), map_piece, &map);
}

/* Newton's iteration on groups of covariances, [G, d, d], as `iternorm.solvers` has it (math.md, section 3). All its
   matrices are symmetric, so half of a product is computed and the rest copied: an error that is not symmetric cannot
   grow. A thread works on a group alone, in padded matrices of its own. */
typedef struct {
  long groups, group_size, steps, unwatched;
  int threads;
} Iteration;

typedef struct {
  const Iteration *iteration;
  const REAL *covariance, *whitening, *grad;
  REAL *kept, *scratch, *out;
} Solve;

enum { NEWTON_MATRICES = 8, MIRRORED = 8 };

static long newton_stride(const Iteration *t) { return whole(t->group_size, most(W, 8)); }

/* Half of the threads, with a tenth of a millisecond for each: half of the products make them as fast as all of them
   are with whole ones, and two cores open no region, which would wait for one that is taken. */
static long newton_team(const Iteration *t) {
  long d = t->group_size;
  return most(1, least(least(t->threads / 2, t->groups), (t->groups * t->steps * d * d * d) >> 21));
}

/* The bytes that newton and newton_backward need. */
API long newton_workspace(const Iteration *t) {
  return sizeof(REAL) * newton_team(t) * NEWTON_MATRICES * newton_stride(t) * newton_stride(t);
}

/* Where R_k and Z_k of a group are kept, for k from 1 on: all R first. */
static REAL *kept_residual(const Solve *t, long k, long group) {
  const Iteration *s = t->iteration;
  return t->kept + ((k - 1) * s->groups + group) * s->group_size * s->group_size;
}
static REAL *kept_iterate(const Solve *t, long k, long group) {
  return kept_residual(t, t->iteration->steps - 1 + k, group);
}

static void copy_matrix(const REAL *from, long from_stride, REAL *to, long to_stride, long d) {
  for (long i = 0; i < d; i++) memcpy(to + i * to_stride, from + i * from_stride, d * sizeof(REAL));
}

static double trace_of(const REAL *a, long d, long stride) {
  double sum = 0;
  for (long i = 0; i < d; i++) sum += a[i * stride + i];
  return sum;
}

/* One that has overflowed would give zeros where its inverse root is a factor: NaN instead. */
static double trace_of_covariance(const REAL *a, long d) {
  double trace = trace_of(a, d, d);
  return __builtin_isinf(trace) ? __builtin_nan("") : trace;
}

static void scale_matrix(const REAL *a, REAL factor, REAL *to, long n) {
  for (long i = 0; i < n * n; i++) to[i] = factor * a[i];
}

/* a = factor a where a is computed, on and above the diagonal, and the same below. */
static void mirror(REAL *a, long n, REAL factor) {
  for (long i = 0; i < n; i++)
    for (long j = i; j < n; j++) a[i * n + j] *= factor;
  for (long i = 0; i < n; i += MIRRORED)
    for (long j = 0; j <= i; j += MIRRORED)
      for (long k = i; k < i + MIRRORED; k++)
        for (long l = j; l < least(j + MIRRORED, k); l++) a[k * n + l] = a[l * n + k];
}

/* to += factor aᵀ. */
static void add_transposed(const REAL *a, REAL factor, REAL *to, long n) {
  for (long i = 0; i < n; i += MIRRORED)
    for (long j = 0; j < n; j += MIRRORED)
      for (long k = i; k < i + MIRRORED; k++)
        for (long l = j; l < j + MIRRORED; l++) to[k * n + l] += factor * a[l * n + k];
}

/* to = factor (a + aᵀ), padded with zeros. */
static void symmetrize(const REAL *a, double factor, REAL *to, long d, long n) {
  memset(to, 0, n * n * sizeof(REAL));
  for (long i = 0; i < d; i++)
    for (long j = i; j < d; j++) to[i * n + j] = (REAL)(factor * ((double)a[i * d + j] + a[j * d + i]));
  mirror(to, n, 1);
}

static void newton_group(const void *task, long group, long thread) {
  const Solve *t = task;
  const Iteration *s = t->iteration;
  long d = s->group_size, n = newton_stride(s);
  const REAL *covariance = t->covariance + group * d * d;
  REAL *residual = t->scratch + thread * NEWTON_MATRICES * n * n, *following = residual + n * n;
  REAL *iterate = following + n * n, *next = iterate + n * n, *free;
  double trace = trace_of_covariance(covariance, d), root = 1 / __builtin_sqrt(trace);
  symmetrize(covariance, 0.5 / trace, residual, d, n);
  scale_matrix(residual, s->steps ? (REAL)-0.5 : 0, iterate, n);
  for (long i = 0; i < d; i++) iterate[i * n + i] += s->steps ? (REAL)1.5 : 1;
  for (long k = 1; k < s->steps; k++) {
    /* Each factor of a product as a power of two of it: (R² - 6 R)/4, R (R² - 6 R)/4 + 9/4 R, (Z R - 3 Z)/-2. */
    REAL *inner = next;
    scale_matrix(residual, -6, inner, n);
    outer_products(residual, residual, n, d, inner, 1);
    mirror(inner, n, (REAL)0.25);
    scale_matrix(residual, (REAL)2.25, following, n);
    outer_products(residual, inner, n, d, following, 1);
    mirror(following, n, 1);
    scale_matrix(iterate, -3, next, n);
    outer_products(iterate, following, n, d, next, 1);
    mirror(next, n, (REAL)-0.5);
    copy_matrix(iterate, n, kept_iterate(t, k, group), d, d);
    if (k >= s->unwatched) {
      /* A step raises the trace, which is 1 at first: it falls where a negative eigenvalue grows. */
      double floor = trace_of(residual, d, n) - 0.5;
      if (trace_of(following, d, n) < (floor < 0.5 ? 0.5 : floor)) {
        memset(following, 0, n * n * sizeof(REAL));
        memcpy(next, iterate, n * n * sizeof(REAL));
      }
    }
    copy_matrix(following, n, kept_residual(t, k, group), d, d);
    free = residual, residual = following, following = free;
    free = iterate, iterate = next, next = free;
  }
  scale_matrix(iterate, (REAL)root, next, n);
  copy_matrix(next, n, t->out + group * d * d, d, d);
}

/* The whitening matrices of covariances with eps, and R_1.. and Z_1.. of all steps but the last. */
API void newton(const Iteration *s, const REAL *covariance, char *workspace, REAL *whitening, REAL *kept) {
  Solve solve = {.iteration = s, .covariance = covariance, .scratch = (REAL *)workspace, .out = whitening, .kept = kept};
  parallel(newton_team(s), s->groups, 1, newton_group, &solve);
}

static void newton_backward_group(const void *task, long group, long thread) {
  const Solve *t = task;
  const Iteration *s = t->iteration;
  long d = s->group_size, n = newton_stride(s), area = n * n;
  const REAL *covariance = t->covariance + group * d * d, *grad = t->grad + group * d * d;
  const REAL *whitening = t->whitening + group * d * d;
  REAL *residual = t->scratch + thread * NEWTON_MATRICES * area, *following = residual + area;
  REAL *iterate = following + area, *d_residual = iterate + area, *d_iterate = d_residual + area;
  REAL *next = d_iterate + area, *half = next + area, *product = half + area, *free;
  double trace = trace_of_covariance(covariance, d), through_trace = 0;
  symmetrize(covariance, 0.5 / trace, residual, d, n);
  symmetrize(grad, 0.5 / __builtin_sqrt(trace), d_residual, d, n);
  scale_matrix(d_residual, s->steps ? (REAL)-0.5 : 0, d_iterate, n);
  memset(following, 0, 2 * area * sizeof(REAL));
  for (long k = 1; k < s->steps; k++) {
    copy_matrix(kept_residual(t, k, group), d, following, n, d);
    copy_matrix(kept_iterate(t, k, group), d, iterate, n, d);
    /* Where it has stopped, R is zero and Z stays. */
    if (k >= s->unwatched && trace_of(following, d, n) < 0.5) break;
    /* product = R dR, half = 3/2 dR - R dR - (R dR)ᵀ/2, dR' = 3/4 half - R half/4 and its transpose. */
    memset(product, 0, area * sizeof(REAL));
    outer_products(residual, d_residual, n, d, product, 0);
    for (long i = 0; i < area; i++) half[i] = (REAL)1.5 * d_residual[i] - product[i];
    add_transposed(product, (REAL)-0.5, half, n);
    scale_matrix(half, -3, product, n);
    outer_products(residual, half, n, d, product, 0);
    scale_matrix(product, (REAL)-0.25, d_residual, n);
    add_transposed(product, (REAL)-0.25, d_residual, n);
    /* dZ' = 3/2 dZ - (dZ R' + Z dR')/2. */
    scale_matrix(d_iterate, -3, next, n);
    outer_products(d_iterate, following, n, d, next, 1);
    outer_products(iterate, d_residual, n, d, next, 1);
    mirror(next, n, (REAL)-0.5);
    free = d_iterate, d_iterate = next, next = free;
    free = residual, residual = following, following = free;
  }
  for (long i = 0; i < d; i++)
    for (long j = 0; j < d; j++)
      through_trace += (double)grad[i * d + j] * whitening[i * d + j] / 2 +
                       (double)d_iterate[i * n + j] * covariance[i * d + j] / trace;
  REAL *out = t->out + group * d * d;
  for (long i = 0; i < d; i++)
    for (long j = 0; j < d; j++) out[i * d + j] = (REAL)((d_iterate[i * n + j] - (i == j) * through_trace) / trace);
}

/* The symmetric gradient for the covariances, given the one for the whitening matrices. */
API void newton_backward(const Iteration *s, const REAL *grad, const REAL *covariance, const REAL *whitening,
                         const REAL *kept, char *workspace, REAL *result) {
  Solve solve = {.iteration = s, .covariance = covariance, .whitening = whitening, .grad = grad,
                 .kept = (REAL *)kept, .scratch = (REAL *)workspace, .out = result};
  parallel(newton_team(s), s->groups, 1, newton_backward_group, &solve);
}
