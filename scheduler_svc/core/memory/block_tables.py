"""The block tables of all rows: the blocks of each request's pages, by cache group."""

from __future__ import annotations

import numpy as np

from protos.plan import Int32


class BlockTables:
    """G cache groups, N rows, W columns; column p is page p. A table has pages first to end - 1."""

    def __init__(self, num_groups: int, num_rows: int, width: int) -> None:
        self.blocks = np.zeros((num_groups, num_rows, width), np.int32)  # [G, N, W]
        self.first = np.zeros((num_groups, num_rows), np.int32)  # [G, N]
        self.end = np.zeros((num_groups, num_rows), np.int32)  # [G, N]

    def of(self, group: int, row: int) -> Int32:
        """A view of the row's table in a group. [end - first]"""
        table: Int32 = self.blocks[group, row, self.first[group, row] : self.end[group, row]]
        return table

    def of_row(self, row: int) -> list[Int32]:
        """Views of the row's tables in all groups. [G]"""
        return [self.of(group, row) for group in range(len(self.blocks))]

    def set(self, group: int, row: int, first: int, blocks: Int32) -> None:
        """Fills an empty table with the blocks of the pages from `first` on."""
        self.blocks[group, row, first : first + len(blocks)] = blocks
        self.first[group, row] = first
        self.end[group, row] = first + len(blocks)

    def extend(self, group: int, rows: Int32, counts: Int32, blocks: Int32) -> None:
        """Appends the next counts[i] of the blocks to rows[i]. rows, counts: [R]"""
        grown = rows.repeat(counts)
        place_in_row = np.arange(len(blocks)) - (counts.cumsum() - counts).repeat(counts)
        self.blocks[group, grown, self.end[group, grown] + place_in_row] = blocks
        self.end[group, rows] += counts

    def clear(self, row: int) -> list[Int32]:
        """Empties the row's tables; returns copies of them. [G]"""
        tables = [table.copy() for table in self.of_row(row)]
        self.first[:, row] = self.end[:, row] = 0
        return tables

    def flat(self, rows: Int32) -> tuple[Int32, Int32]:
        """The rows' tables, group after group, as CSR: starts [G, R+1] and blocks [B]."""
        num_groups, num_rows, width = self.blocks.shape
        places, offset = [], 0
        start = np.empty((num_groups, len(rows) + 1), np.int32)
        for group in range(num_groups):
            first = self.first[group, rows]
            lengths = self.end[group, rows] - first
            start[group] = starts(lengths)
            # per row: offset of its table in `self.blocks`, less its offset in the result
            shift = (group * num_rows + rows.astype(np.int64)) * width + first
            shift -= start[group, :-1]
            places.append(np.arange(start[group, -1]) + np.repeat(shift, lengths))
            start[group] += np.int32(offset)
            offset = int(start[group, -1])
        place = places[0] if num_groups == 1 else np.concatenate(places)
        return start, self.blocks.reshape(-1).take(place)


def starts(counts: Int32) -> Int32:
    """Exclusive prefix sums, then the total. [n] → [n+1]"""
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
